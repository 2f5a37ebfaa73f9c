// What a key of the administration permits on this page: to see the disk, and to load and unload models.

import { say, by } from "./dom.js";
import * as keys from "./keys.js";
import { administer } from "./net.js";

const AGAIN_MS = 5000; // between two checks of the disk while a model is on its way
const SELDOM_MS = 60_000;
const SHOWN_MS = 15_000; // of a message about what was done

/** `may`: the key permits to load models. `disk`: the models on this Mac's disk, null while not known. */
export const rights = { may: false, disk: null };

const listeners = [];
let lookedAt = -Infinity;
let looking = "";
let fades = 0;

export const onRights = (tell) => listeners.push(tell);

export function startAdmin() {
  by("notices-close").addEventListener("click", () => {
    problem("");
    done("");
  });
  keys.onKeys(() => {
    lookedAt = -Infinity;
    set(false, null);
    problem("");
    check();
  });
  check();
}

/** Look at the disk again, if it is time. */
export async function check(busy = false) {
  const key = keys.admin();
  if (!key || looking === key || performance.now() - lookedAt < (busy || !rights.may ? AGAIN_MS : SELDOM_MS)) return;
  [looking, lookedAt] = [key, performance.now()];
  try {
    const { models } = await administer("GET", "models", key);
    if (key === keys.admin()) set(true, models);
  } catch (error) {
    if (key !== keys.admin()) return;
    if (error.status === 403) keys.onlyChats();
    refused(error);
  } finally {
    if (looking === key) looking = "";
  }
}

function set(may, disk) {
  if (may === rights.may && JSON.stringify(disk) === JSON.stringify(rights.disk)) return;
  Object.assign(rights, { may, disk });
  listeners.forEach((tell) => tell());
}

/** Send a command, and say in `words` what it did, or the agent's refusal. Return true if it was carried out. */
export async function act(what, body, words) {
  problem("");
  done("");
  try {
    done(words(await administer("POST", what, keys.admin(), body)));
    lookedAt = -Infinity;
    return true;
  } catch (error) {
    refused(error);
    return false;
  }
}

function refused(error) {
  if (error.status === 401) {
    keys.setAdmin("");
    problem("That key is not valid: each start of the agent makes a new one. `mlxtp page` prints it.");
  } else problem(error.message);
}

/** Show what is wrong until it is closed, or mended. */
export function problem(words) {
  say(by("problem"), words);
  by("notices-close").hidden = !words && !by("said").textContent;
}

/** Show what was done, for a while. */
function done(words) {
  clearTimeout(fades);
  say(by("said"), words);
  by("notices-close").hidden = !words && !by("problem").textContent;
  if (words) fades = setTimeout(() => done(""), SHOWN_MS);
}
