// Work that can wait: a few milliseconds of it before each frame, the latest first.

const SLICE_MS = 6;
const tasks = [];

/** Call `task` before one of the next frames. */
export function soon(task) {
  tasks.push(task);
  if (tasks.length === 1) requestAnimationFrame(work);
}

function work() {
  const until = performance.now() + SLICE_MS;
  while (tasks.length && performance.now() < until) tasks.pop()();
  if (tasks.length) requestAnimationFrame(work);
}
