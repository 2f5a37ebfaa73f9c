// Checks of one JavaScript library against one endpoint, each reported as one line of JSON.
export const URL_ = process.env.APPS_URL, MODEL = process.env.APPS_MODEL, PART = process.argv[2];
export const SCRIPTED = process.env.APPS_ENGINE === "actor";
export const JSON_ = 'DO json {"answer": 9, "word": "nine"}';
export const SAY = 'DO say "The sky is blue."', CALL = 'DO call look_up {"n": 5}';

export async function check(name, act, expected = "", scripted = false) {
  if (scripted && !SCRIPTED) return;
  let ok = true, note = "";
  try {
    const found = JSON.stringify(await act());
    if (!found || (SCRIPTED && !found.includes(expected))) throw new Error(`${found} came`);
  } catch (error) {
    [ok, note] = [false, `${error.name}: ${error.message}`.slice(0, 300)];
  }
  console.log(JSON.stringify({ tried: name, ok, note }));
}
