// The view of models: a form that loads one, those on this Mac's disk, and the use of API keys.

import { onRights, problem, rights } from "./admin.js";
import { serve } from "./deployments.js";
import { by, el, update } from "./dom.js";
import * as keys from "./keys.js";
import { cluster } from "./watch.js";
import { bytes, count } from "./words.js";

const FIELDS = ["nodes", "replicas", "parallel", "split", "on", "keep"]; // as `mlxtp serve` names them

export function startModels() {
  by("admin-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keys.setAdmin(by("admin-key").value);
    by("admin-key").value = "";
  });
  by("serve-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const model = by("model").value.trim();
    if (model) load(model);
    else {
      problem("Name a model: an id on the Hub, or a folder that every Mac has.");
      by("model").focus();
    }
  });
  onRights(access);
  access();
}

/** Show what the key permits; the disk only here. */
function access() {
  by("admin-form").hidden = rights.may;
  by("manage").hidden = !rights.may;
  showModels();
}

export function showModels() {
  if (!rights.disk) return;
  const served = new Map((cluster.now?.deployments ?? []).map((each) => [each.model, each]));
  const items = rights.disk.map((each) => row(each, served.get(each.name)));
  update(by("disk"), items.length ? items : [el("li", { class: "none" }, "No models are on this Mac's disk.")]);
}

function row(model, served) {
  const where = model.source === "embedded" ? "comes with mlxtp" : "in the Hub's cache";
  const whole = model.complete ? "" : ", not complete: loading it downloads the rest";
  return el(
    "li",
    { "data-key": model.name },
    el("b", {}, model.name),
    el("span", { class: "about" }, `${bytes(model.size_bytes)}, ${where}${whole}`),
    served
      ? el("span", { class: "about" }, served.replicas.ready ? `served, ${count(served.replicas.ready, "replica")}` : served.state)
      : el("button", { type: "button", "aria-label": `Load ${model.name}`, click: () => load(model.name) }, "Load"),
  );
}

/** Load a model as the form says. Fields that are empty are as before, or the agent's own choice. */
async function load(model) {
  const given = FIELDS.map((name) => [name, by(`serve-${name}`).value.trim()]).filter(([, value]) => value);
  const asked = { ...Object.fromEntries(given), ...(by("serve-only").checked ? { only: "1" } : {}) };
  if (await serve(model, asked)) {
    by("serve-form").reset();
    by("serve-more").open = false;
  }
}
