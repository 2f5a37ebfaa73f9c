// The page as a whole: the choice of the view, the status line, and the keys.

import { startChat } from "./chat.js";
import { showCluster } from "./cluster.js";
import { by, icon, say } from "./dom.js";
import { takeFromAddress } from "./keys.js";
import { showModels, startModels } from "./models.js";
import { cluster, onMoment, watch } from "./watch.js";
import { count, rate, stateWords } from "./words.js";

const VIEWS = { chat: "Chat", cluster: "Cluster", models: "Models" };

function show() {
  takeFromAddress();
  const asked = location.hash.slice(1);
  const view = Object.hasOwn(VIEWS, asked) ? asked : "chat";
  for (const name of Object.keys(VIEWS)) {
    by(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[view]} – mlxtp`;
  if (cluster.now) showAll();
}

function showAll() {
  if (!by("cluster").hidden) showCluster(cluster);
  if (!by("models").hidden) showModels(cluster);
}

function showState({ now, connected, problem }) {
  const state = by("state");
  state.dataset.state = connected ? now.state : "unknown";
  if (!connected) {
    say(state, now ? "The agent does not answer; what is shown is old" : problem || "Looking for the agent…");
    say(by("figures"), "");
    return;
  }
  say(state, stateWords(now));
  const speed = now.tokens_per_second;
  const where = speed.of === "here" ? " asked here" : "";
  const { open } = now.requests;
  const figures = [speed.value ? `${rate(speed.value)}${where}` : "", open ? count(open, "request") : ""];
  say(by("figures"), figures.filter(Boolean).join(" · "));
}

for (const each of document.querySelectorAll("[data-icon]")) each.prepend(icon(each.dataset.icon));
by("skip").addEventListener("click", (event) => {
  event.preventDefault();
  by("main").focus();
});
addEventListener("hashchange", show);
addEventListener("resize", () => cluster.now && showAll());
startChat();
startModels();
show();
onMoment((moment) => {
  showState(moment);
  if (moment.now) showAll();
});
watch();
