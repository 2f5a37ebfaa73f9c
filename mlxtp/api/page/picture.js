// The desk as a picture: Macs, what joins them, and the groups as bands over their Macs. Places depend on which Macs
// and groups there are and on the width, so that nothing moves when states change.

import { svg } from "./dom.js";
import { colourOf, groupsOf, letterOf, svgMark } from "./marks.js";
import { all, bytes, count, groupWord, linkWords, macWord, micros, NETWORKS, ofWhole, phaseOf, rate, shortName, speed, stateWords, UNKNOWN } from "./words.js";

const NARROW = 560; // less has one Mac in a row, and bands at their side
const MANY = 12; // more Macs are drawn small, without cables
const LANE = 44; // height of a band
const TRACK = 26; // width of one beside a Mac
const LINE = 19;
const EDGE = 2;

let order = []; // node ids as they were drawn last

/** Return what to draw for a width, in pixels: `{ width, height, macs, bands, cables, small, upright }`. Pure but for `order`. */
export function plan(now, width) {
  const groups = groupsOf(now);
  order = arrange(now.nodes.map(({ node_id: id }) => id), groups, order);
  const nodes = order.map((id) => now.nodes.find(({ node_id: other }) => other === id));
  const upright = width < NARROW && nodes.length <= MANY;
  const small = nodes.length > MANY;
  const columns = small ? Math.max(2, Math.floor(width / 116)) : upright ? 1 : columnsOf(nodes.length, width);
  const macs = nodes.map((node, i) => ({ node, groups: groups.filter(({ macs }) => macs.includes(node.node_id)), ...cell(i, columns, small) }));
  const bands = small ? [] : lanes(groups, macs);
  const size = sizes(macs, bands, columns, width, { small, upright });
  for (const mac of macs) Object.assign(mac, size.at(mac));
  for (const band of bands) Object.assign(band, size.band(band));
  const cables = small ? [] : cablesOf(now, macs, columns);
  return { width, height: deepest(cables, size.height), macs, bands, cables, small, upright };
}

/** Return the Macs' ids so that those of each group stand beside each other; the order before holds if it does that. */
export function arrange(ids, groups, before) {
  const kept = [...before.filter((id) => ids.includes(id)), ...ids.filter((id) => !before.includes(id))];
  const together = ({ macs }) => {
    const at = macs.map((id) => kept.indexOf(id)).filter((i) => i >= 0);
    return Math.max(...at) - Math.min(...at) === at.length - 1;
  };
  if (groups.every(together)) return kept;
  const widest = [...groups].sort((a, b) => b.macs.length - a.macs.length);
  const first = widest.flatMap((group) => inOrder(group));
  return [...new Set([...first, ...kept])].filter((id) => ids.includes(id));
}

/** Return a group's Macs as its tokens pass them: of a pipeline the stages, of which rank 0 has the last. */
const inOrder = (group) => (group.split?.length ? [...group.macs].reverse() : group.macs);

function columnsOf(number, width) {
  const most = Math.max(2, Math.floor((width + 70) / 240));
  if (number <= most) return number;
  const rows = Math.ceil(number / most);
  return Math.ceil(number / rows);
}

/** Return the row and column of a Mac. Every other row goes back, so that a ring of two rows is a ring. */
function cell(i, columns, small) {
  const row = Math.floor(i / columns);
  return { row, column: row % 2 && !small ? columns - 1 - (i % columns) : i % columns };
}

/** Return the bands: one for each group and row, in the lowest free lane. */
function lanes(groups, macs) {
  const found = [];
  for (const group of [...groups].sort((a, b) => b.macs.length - a.macs.length)) {
    const own = macs.filter(({ node }) => group.macs.includes(node.node_id));
    for (const row of new Set(own.map((mac) => mac.row))) {
      const columns = own.filter((mac) => mac.row === row).map((mac) => mac.column);
      const [from, to] = [Math.min(...columns), Math.max(...columns)];
      const taken = new Set(found.filter((other) => other.row === row && other.from <= to && from <= other.to).map(({ lane }) => lane));
      let lane = 0;
      while (taken.has(lane)) lane += 1;
      found.push({ group, row, from, to, lane, first: row === own[0].row });
    }
  }
  return found;
}

function sizes(macs, bands, columns, width, { small, upright }) {
  const rows = Math.max(...macs.map(({ row }) => row), 0) + 1;
  const lines = Math.max(...macs.map((mac) => Math.min(mac.groups.length, 3)), 1);
  const tall = small ? 58 : 92 + LINE * lines;
  const lanesOf = (row) => Math.max(...bands.filter((band) => band.row === row).map(({ lane }) => lane + 1), 0);
  if (upright) {
    const tracks = Math.max(...bands.map(({ lane }) => lane + 1), 0);
    const column = (band) => EDGE + band.lane * TRACK;
    // Each Mac is a row: the lanes of one group are at one place in all of them.
    const lane = new Map();
    for (const { group } of bands) if (!lane.has(group.id)) lane.set(group.id, freeTrack(lane, group, macs));
    for (const band of bands) band.lane = lane.get(band.group.id);
    const used = Math.max(tracks, ...[...lane.values()].map((each) => each + 1), 0);
    const [left, step] = [EDGE + used * TRACK + (used ? 6 : 0), tall + 54];
    return {
      height: rows * step - 54 + 2 * EDGE,
      at: (mac) => ({ x: left, y: EDGE + mac.row * step, width: width - left - EDGE, height: tall }),
      band: (band) => ({ x: column(band), y: EDGE + band.row * step, width: TRACK - 6, height: tall }),
    };
  }
  const least = small ? 12 : columns === 2 ? width * 0.2 : Math.min(104, Math.max(64, width * 0.1));
  const wide = Math.min((width - 2 * EDGE - (columns - 1) * least) / columns, small ? 150 : 340);
  const gap = columns > 1 ? Math.min((width - 2 * EDGE - columns * wide) / (columns - 1), small ? 12 : 240) : 0;
  const left = EDGE;
  const tops = [];
  let y = EDGE;
  for (let row = 0; row < rows; row += 1) {
    y += lanesOf(row) * LANE;
    tops.push(y);
    y += tall + (small ? 12 : 64);
  }
  const x = (column) => left + column * (wide + gap);
  return {
    height: y - (small ? 12 : 64) + EDGE,
    at: (mac) => ({ x: x(mac.column), y: tops[mac.row], width: wide, height: tall }),
    band: (band) => ({ x: x(band.from), y: tops[band.row] - (band.lane + 1) * LANE, width: x(band.to) + wide - x(band.from), height: LANE - 8 }),
  };
}

/** Return the first track beside the Macs that no group with a Mac in between has. */
function freeTrack(taken, group, macs) {
  const span = (each) => macs.map((mac, i) => (mac.groups.some(({ id }) => id === each) ? i : -1)).filter((i) => i >= 0);
  const [from, to] = [Math.min(...span(group.id)), Math.max(...span(group.id))];
  const busy = new Set([...taken].filter(([id]) => Math.min(...span(id)) <= to && from <= Math.max(...span(id))).map(([, lane]) => lane));
  let lane = 0;
  while (busy.has(lane)) lane += 1;
  return lane;
}

// --- what joins the Macs ----------------------------------------------------------------------------------

/** Return the cables to draw: those that groups use, Thunderbolt, and else those between neighbours. */
function cablesOf(now, macs, columns) {
  const at = new Map(macs.map((mac, i) => [mac.node.node_id, { mac, i }]));
  const used = usedPairs(now);
  const linked = new Set(now.links.map(({ a, b }) => pair(a, b)));
  const unknown = [...used.keys()].filter((key) => !linked.has(key)).map((key) => key.split(" "));
  const all = [...now.links, ...unknown.map(([a, b]) => ({ a, b, network: "", rdma: false, mbps: null }))];
  const depth = new Map();
  return all.flatMap((link) => {
    const [a, b] = [at.get(link.a), at.get(link.b)];
    if (!a || !b || a === b) return [];
    const group = used.get(pair(link.a, link.b));
    if (!group && link.network !== "thunderbolt" && Math.abs(a.i - b.i) !== 1) return [];
    const [p, q] = a.i < b.i ? [a.mac, b.mac] : [b.mac, a.mac];
    return [{ link, group, ...route(p, q, columns, depth) }];
  });
}

const pair = (a, b) => [a, b].sort().join(" ");

/** Return the pairs of Macs that exchange tensors, each with its group. */
function usedPairs(now) {
  const found = new Map();
  for (const group of groupsOf(now)) {
    const { macs } = group;
    const mesh = group.kind === "JACCL mesh" || macs.length < 3;
    macs.forEach((a, i) => {
      const others = mesh ? macs.slice(i + 1) : [macs[(i + 1) % macs.length]];
      for (const b of others) if (a !== b) found.set(pair(a, b), group);
    });
  }
  return found;
}

/** Return the path of a cable, and where its words stand. `depth`: arcs below each row so far. */
function route(p, q, columns, depth) {
  const beside = p.row === q.row && Math.abs(p.column - q.column) === 1;
  const below = p.column === q.column && q.row - p.row === 1;
  if (beside) {
    const [l, r] = p.x < q.x ? [p, q] : [q, p];
    const y = l.y + l.height / 2;
    return { path: `M${l.x + l.width} ${y}H${r.x}`, at: { x: (l.x + l.width + r.x) / 2, y }, room: r.x - l.x - l.width, way: "across" };
  }
  if (below) {
    const x = columns === 1 ? p.x + 36 : p.x + p.width / 2;
    const end = columns > 1 && p.column === columns - 1; // its words would not fit at its right
    return { path: `M${x} ${p.y + p.height}V${q.y}`, at: { x: end ? x - 10 : x + 10, y: p.y + p.height + 27 }, room: 400, way: end ? "down end" : "down" };
  }
  if (p.row === q.row || columns === 1) {
    const side = columns === 1;
    const level = (depth.get(side ? -1 : p.row) ?? 0) + 1;
    depth.set(side ? -1 : p.row, level);
    const far = 10 + 12 * level;
    if (side) {
      const [x, y, z] = [p.x + p.width, p.y + p.height / 2, q.y + q.height / 2];
      return { path: `M${x} ${y}C${x + 2} ${y} ${x + 2} ${z} ${x} ${z}`, at: null, room: 0, way: "arc", far: 0 };
    }
    const [x, y, z] = [p.x + p.width / 2 + 8 * level, p.y + p.height, q.x + q.width / 2 - 8 * level];
    const shape = `M${x} ${y}V${y + far - 8}Q${x} ${y + far} ${x + Math.sign(z - x) * 8} ${y + far}H${z - Math.sign(z - x) * 8}Q${z} ${y + far} ${z} ${y + far - 8}V${y}`;
    return { path: shape, at: { x: (x + z) / 2, y: y + far }, room: Math.abs(z - x), way: "arc", bottom: y + far + 8 };
  }
  const level = (depth.get(p.row) ?? 0) + 1;
  depth.set(p.row, level);
  const [x, z, y] = [p.x + p.width / 2 + 9 * level, q.x + q.width / 2 + 9 * level, p.y + p.height];
  return { path: `M${x} ${y}V${y + 8 + 7 * level}H${z}V${q.y}`, at: null, room: 0, way: "over" };
}

const deepest = (cables, height) => Math.max(...cables.map(({ bottom }) => bottom ?? 0), height);

// --- drawing ----------------------------------------------------------------------------------------------

/** Return the shapes of a plan. */
export function draw(made, now) {
  return [
    ...made.cables.map((each) => cable(each, now)),
    ...made.bands.map((each) => (made.upright ? track(each, made) : band(each, made))),
    ...made.macs.map((each) => (made.small ? smallMac(each) : mac(each, now, made))),
  ];
}

/** Return the picture in one sentence; the lists below have the rest. */
export function describe(now) {
  const alive = now.nodes.filter((node) => node.state === "alive").length;
  const groups = groupsOf(now).map((group) => {
    const names = group.macs.map((id) => now.nodes.find((node) => node.node_id === id)?.name ?? id.slice(0, 8));
    return `Group ${letterOf(group.id)}, ${shortName(group.deployment.model)}, on ${all(names)}: ${groupWord(group.state)}.`;
  });
  return [`${count(now.nodes.length, "Mac")}, ${alive} present. ${stateWords(now)}.`, ...groups, "The list “In words” below has the rest."].join(" ");
}

function cable({ link, group, path, at, room, way }, now) {
  const known = link.rdma ? "rdma" : link.network || "unknown";
  const clear = group?.exposed ? "in the clear" : "";
  const name = NETWORKS[link.network] ?? (link.network || `link ${UNKNOWN}`);
  const kind = link.network === "thunderbolt" ? (link.rdma ? "RDMA" : "TCP") : "";
  const took = group && now.ranks.length === 2 && group.id === now.shown ? now.group?.fabric?.collective_us : null;
  const timed = took && way !== "arc" ? `${micros(took)} a sum` : "";
  const tight = way === "across" && widthOf(linkWords(link) || name, SMALL) > room - 10;
  const lines = tight ? [[name], [[kind, speed(link.mbps)].filter(Boolean).join(", "), timed].filter(Boolean)] : [[linkWords(link) || name], [timed]];
  const words = at ? [...lines[0].filter(Boolean).map((line) => [line, -8]), ...lines[1].filter(Boolean).map((line, i) => [line, 18 + 15 * i])] : [];
  if (at && clear) words.push([clear, 18 + 15 * lines[1].filter(Boolean).length]);
  const shown = way.startsWith("down") ? words.map(([line], i) => [line, 5 + 15 * (i - (words.length - 1) / 2)]) : words;
  return svg(
    "g",
    { class: group ? "cable used" : "cable", "data-kind": known },
    svg("path", { d: path }),
    ...shown.map(([line, down]) => svg("text", { x: at.x, y: at.y + down, class: line === clear ? "label clear" : "label", "data-way": way }, line)),
  );
}

/** Return the band of a group over a row of its Macs. Its rail differs: one Mac, equal parts of each layer, or stages. */
function band({ group, x, y, width, height, row, first }, made) {
  const own = made.macs.filter((mac) => mac.row === row && group.macs.includes(mac.node.node_id));
  const title = `${shortName(group.deployment.model)}${group.number ? ` ${group.number}` : ""}`;
  const how = group.macs.length > 1 ? (group.split?.length ? "pipeline" : "tensor parallel") : "";
  const told = !first ? "" : group.tokens_per_second ? rate(group.tokens_per_second) : group.state === "ready" ? "" : groupWord(group.state);
  const offset = 22 + letterOf(group.id).length * 8;
  const room = width - offset - 10;
  const right = widthOf(told, SMALL) < room - 90 ? told : "";
  const name = fit(first ? title : `${title}, too`, room - (right ? widthOf(right, SMALL) + 10 : 0), BOLD);
  const between = first && widthOf(name, BOLD) + widthOf(right, SMALL) + widthOf(how, SMALL) + 30 < room ? how : "";
  return svg(
    "g",
    { class: "band", "data-mark": colourOf(group.id), "data-state": group.state, "data-how": how },
    svg("rect", { x, y, width, height, rx: 7, class: "tint" }),
    svgMark(group.id, x + 7, y + 6),
    svg("text", { x: x + offset, y: y + 19, class: "name" }, name, between ? svg("tspan", { class: "small", dx: 8 }, between) : null),
    svg("text", { x: x + width - 10, y: y + 18, class: "small end" }, right),
    ...rail(group, own, x, y + height - 7, width),
  );
}

function rail(group, own, x, y, width) {
  if (group.split?.length) {
    const backwards = own.length > 1 && inOrder(group).indexOf(own[0].node.node_id) > inOrder(group).indexOf(own[1].node.node_id) === own[0].x < own[1].x;
    return own.map((mac) => {
      const [from, to] = backwards ? [mac.x + mac.width - 8, mac.x + 8] : [mac.x + 8, mac.x + mac.width - 8];
      const tip = Math.sign(to - from) * 8;
      return svg("path", { class: "rail", d: `M${from} ${y - 2}H${to - tip}L${to} ${y + 1}L${to - tip} ${y + 4}H${from}L${from + tip} ${y + 1}Z` });
    });
  }
  const line = (at) => svg("rect", { class: "rail", x: x + 8, y: at, width: width - 16, height: 2.5, rx: 1.2 });
  return group.macs.length > 1 ? [line(y - 2), line(y + 2.5)] : [line(y)];
}

/** Return a band beside a Mac, on a narrow screen; it reaches to the next Mac of its group. */
function track({ group, x, y, width, height, row }, made) {
  const next = made.bands.find((other) => other.group.id === group.id && other.row > row);
  return svg(
    "g",
    { class: "band", "data-mark": colourOf(group.id), "data-state": group.state, "data-how": group.macs.length > 1 ? (group.split?.length ? "pipeline" : "tensor parallel") : "" },
    next ? svg("rect", { x: x + width / 2 - 1.5, y, width: 3, height: next.y - y, class: "rail" }) : null,
    svg("rect", { x, y, width, height, rx: 6, class: "tint" }),
    svg("rect", { x: x + width / 2 - 1.5, y: y + 28, width: 3, height: height - 34, rx: 1.5, class: "rail" }),
    svgMark(group.id, x + (width - 8 - letterOf(group.id).length * 8) / 2, y + 6),
  );
}

function mac({ node, groups, x, y, width, height }, now, made) {
  const lines = groups.slice(0, groups.length > 3 ? 2 : 3);
  const more = groups.length - lines.length;
  const roles = [node.self ? "this Mac" : node.state === "alive" ? "" : macWord(node.state), node.draining ? "about to stop" : ""];
  const about = [node.chip?.replace(/^Apple /, "") || `chip ${UNKNOWN}`, ...roles].filter(Boolean).join(" · ");
  const top = 62;
  return svg(
    "g",
    { class: "mac", "data-state": node.state, transform: `translate(${x} ${y})` },
    svg("rect", { width, height, rx: 12, class: "case" }),
    svg("circle", { cx: width - 16, cy: 18, r: 3, class: "lamp", "data-works": String(groups.some(({ requests }) => requests.running + requests.waiting > 0)) }),
    svg("text", { x: 14, y: 24, class: "name" }, fit(node.name, width - 44, BOLD)),
    svg("text", { x: 14, y: 42, class: "small" }, fit(about, width - 24, SMALL)),
    ...lines.map((group, i) => doing(group, node, now, top + i * LINE, width, made)),
    more > 0 ? svg("text", { x: 14, y: top + lines.length * LINE + 3, class: "small" }, `and ${count(more, "more group")}`) : null,
    groups.length ? null : svg("text", { x: 14, y: top + 3, class: "small" }, node.state === "alive" ? "free" : ""),
    ...memory(node, width, height),
  );
}

/** Return a line about one group on one Mac. */
function doing(group, node, now, y, width, made) {
  const offset = 20 + letterOf(group.id).length * 8;
  const model = made.upright ? `${shortName(group.deployment.model)}: ` : "";
  const room = width - offset - 16;
  const does = `${model}${phaseOf(group, node, now)}`;
  const more = [does, layers(group, node)].filter(Boolean).join(", ");
  const words = widthOf(more, SMALL) <= room ? more : fit(does, room, SMALL);
  return svg(
    "g",
    {},
    svgMark(group.id, 14, y - 10),
    svg("text", { x: 8 + offset, y: y + 3, class: "small told" }, words),
  );
}

/** Return the layers of a Mac's stage: "layers 25–48". */
export function layers(group, node) {
  if (!group.split?.length) return "";
  const rank = group.macs.indexOf(node.node_id);
  const before = group.split.slice(rank + 1).reduce((all, each) => all + each, 0); // rank 0 has the last ones
  return `layers ${before + 1}–${before + group.split[rank]}`;
}

function memory({ memory_bytes: total, free_bytes: free, held_bytes: held = 0 }, width, height) {
  const [x, y, wide] = [14, height - 16, width - 28];
  if (!total) return [svg("text", { x, y: y + 2, class: "small" }, `memory ${UNKNOWN}`)];
  const used = free ? Math.max(total - free - held, 0) : 0;
  const part = (name, from, amount) => svg("rect", { class: name, x: x + (wide * from) / total, y, width: Math.max((wide * Math.min(amount, total - from)) / total, 0), height: 5, rx: 1 });
  const words = free ? `${ofWhole(free, total)} free` : `${bytes(total)} of memory`;
  return [
    svg("text", { x, y: y - 7, class: "small" }, fit(words, wide, SMALL)),
    svg("rect", { class: "memory", x, y, width: wide, height: 5, rx: 2.5 }),
    part("other", 0, used),
    part("held", used, held),
  ];
}

/** Return a Mac among very many: its name, its groups' letters, and its memory. */
function smallMac({ node, groups, x, y, width, height }) {
  const shown = groups.slice(0, Math.max(1, Math.floor((width - 16) / 24)));
  return svg(
    "g",
    { class: "mac", "data-state": node.state, transform: `translate(${x} ${y})` },
    svg("rect", { width, height, rx: 8, class: "case" }),
    svg("text", { x: 8, y: 17, class: "small told" }, fit(node.name, width - 16, SMALL)),
    ...(node.state === "alive" ? shown.map((group, i) => svgMark(group.id, 8 + i * 24, 24)) : [svg("text", { x: 8, y: 36, class: "small" }, macWord(node.state))]),
    ...memory(node, width + 12, height + 6).slice(1).map((each) => {
      each.setAttribute("transform", "translate(-6 0)");
      return each;
    }),
  );
}

// --- widths of text ---------------------------------------------------------------------------------------

const [SMALL, BOLD] = ["12px", "600 15px"];
const pen = document.createElement("canvas").getContext("2d");
let face = "";

function widthOf(text, font) {
  face ||= getComputedStyle(document.documentElement).fontFamily;
  pen.font = `${font} ${face}`;
  return pen.measureText(text).width;
}

/** Return as much of a text as there is room for, in pixels. */
function fit(text, room, font) {
  if (widthOf(text, font) <= room) return text;
  let most = text.length - 1;
  while (most > 1 && widthOf(`${text.slice(0, most)}…`, font) > room) most -= 1;
  return `${text.slice(0, most)}…`;
}

/** Return the ways of tokens along a group's bands, in the direction in which they pass it: points in pixels. */
export function ways({ bands, macs, upright }, id) {
  const own = bands.filter(({ group }) => group.id === id);
  if (!own.length) return [];
  const { group } = own[0];
  const order = inOrder(group);
  const parts = own.map((each) => (upright ? [{ x: each.x + each.width / 2, y: each.y + 28 }, { x: each.x + each.width / 2, y: each.y + each.height - 6 }] : [{ x: each.x + 10, y: each.y + each.height - 6 }, { x: each.x + each.width - 10, y: each.y + each.height - 6 }]));
  const first = macs.find(({ node }) => node.node_id === order[0]);
  const last = macs.find(({ node }) => node.node_id === order.at(-1));
  if (first && last && (upright ? first.y > last.y : first.row === last.row && first.x > last.x)) {
    parts.reverse();
    parts.forEach((part) => part.reverse());
  }
  return parts;
}
