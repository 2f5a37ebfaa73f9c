// The page as a whole: its parts, and the line about the state.

import { startChat } from "./chat.js";
import { check, onRights, startAdmin } from "./admin.js";
import { redraw, showDesk } from "./desk.js";
import { by, icon, say } from "./dom.js";
import { askForApiKey } from "./keys.js";
import { showModels, startModels } from "./models.js";
import { onShow, shows, startShell } from "./shell.js";
import { showUsage, startUsage } from "./usage.js";
import { cluster, onMoment, watch } from "./watch.js";
import { count, rate, stateWords } from "./words.js";

function showAll(news = false) {
  const { now, connected } = cluster;
  if (!now) return;
  if (connected) {
    check(now.state !== "ready" || now.transfers.length > 0);
    if (shows("models") || now.running.length) showUsage();
  }
  if (shows("desk")) showDesk(cluster, news);
  if (shows("models")) showModels();
}

/** Draw what else than the agent's state has changed. */
function drawAgain() {
  redraw();
  showAll();
}

function showState({ now, connected, locked, problem }) {
  const state = by("state");
  state.dataset.state = connected ? now.state : "unknown";
  by("unlock").hidden = !locked;
  if (!connected) {
    if (locked) say(state, "The agent takes an API key");
    else say(state, now ? "The agent does not answer; what is shown is old" : problem || "Looking for the agent…");
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
onShow(() => showAll());
new ResizeObserver(() => showAll()).observe(by("desk"));
onRights(drawAgain);
by("unlock").addEventListener("click", () => askForApiKey(cluster.locked));
startShell();
startChat();
startAdmin();
startUsage(drawAgain);
startModels();
onMoment((moment) => {
  showState(moment);
  showAll(true);
});
watch();
