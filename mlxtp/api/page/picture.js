// The cluster as a picture. Places depend only on the number of Macs and the width, so that nothing moves
// when states change.

import { svg } from "./dom.js";
import { bytes, count, linkWords, macWord, micros, phaseWord, stateWords, UNKNOWN } from "./words.js";

const NARROW = 600;
const HEAD = 74;
const ROW = 34;
const GAP = 76;
const MARGIN = 2;

/** Return an `svg` element that is `width` pixels wide. */
export function draw(now, width) {
  const cards = now.nodes.map((node) => ({ node, ranks: now.ranks.filter((rank) => rank.node === node.node_id) }));
  const first = (card) => card.ranks[0]?.rank ?? Infinity;
  cards.sort((a, b) => (first(a) === first(b) ? 0 : first(a) - first(b)));
  const most = Math.max(...cards.map((card) => card.ranks.length), 0);
  const alone = cards.length === 1; // fills its column
  const size = { width: Math.min(width - 2 * MARGIN, alone ? Infinity : width < NARROW ? 330 : 236), height: HEAD + Math.max(most, 1) * ROW + 8 };
  const { places, height } = layout(cards.length, size, width);
  cards.forEach((card, i) => Object.assign(card, places[i], size));
  const words = describe(now);
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words, class: "picture", "data-state": now.state },
    ...joins(now, cards, width),
    ...cards.map((card) => machine(card, now)),
  );
}

function describe(now) {
  const alive = now.nodes.filter((node) => node.state === "alive").length;
  const macs = `${count(now.nodes.length, "Mac")}, ${alive} present`;
  return `${macs}. ${stateWords(now)}. The lists below say the same in words.`;
}

/** Return the upper left corners of this number of cards. */
function layout(number, size, width) {
  const column = (columns) => {
    const rows = Math.ceil(number / columns);
    const step = columns > 1 ? (width - 2 * MARGIN - size.width) / (columns - 1) : 0;
    const left = columns > 1 ? MARGIN : (width - size.width) / 2;
    const places = Array.from({ length: number }, (_, i) => ({
      x: left + (i % columns) * step,
      y: MARGIN + Math.floor(i / columns) * (size.height + GAP),
    }));
    return { places, height: 2 * MARGIN + rows * size.height + (rows - 1) * GAP };
  };
  if (number < 2 || width < NARROW) return column(1);
  if (number === 2) return column(2);
  if (number > 4 && width < 800) return column(2);
  if (number > 6) return column(Math.max(2, Math.floor(width / (size.width + GAP))));
  const across = (width - size.width) / 2 - MARGIN;
  const down = (size.height + GAP) * (number > 4 ? 0.95 : 0.6);
  const turn = number === 4 ? Math.PI / 4 : 0;
  const places = Array.from({ length: number }, (_, i) => {
    const angle = (2 * Math.PI * i) / number - Math.PI / 2 - turn;
    return { x: width / 2 + across * Math.cos(angle) - size.width / 2, y: down * Math.sin(angle) };
  });
  const top = Math.min(...places.map((place) => place.y));
  places.forEach((place) => (place.y += MARGIN - top));
  return { places, height: Math.max(...places.map((place) => place.y)) + size.height + MARGIN };
}

// --- links ------------------------------------------------------------------------------------------------

function joins(now, cards, width) {
  const at = new Map(cards.map((card) => [card.node.node_id, card]));
  const used = new Set();
  for (const [a, b] of now.group?.pairs ?? []) used.add(pair(now.ranks[a]?.node, now.ranks[b]?.node));
  const linked = new Set(now.links.map((link) => pair(link.a, link.b)));
  const missing = [...used].filter((key) => !linked.has(key)).map((key) => key.split(" "));
  const unknown = missing.filter(([a, b]) => a !== b && at.has(a) && at.has(b));
  const all = [...now.links, ...unknown.map(([a, b]) => ({ a, b, network: "" }))];
  return all.flatMap((link) => {
    const [a, b] = [at.get(link.a), at.get(link.b)];
    return a && b ? cable(link, a, b, used.has(pair(link.a, link.b)), now, width, cards.length) : [];
  });
}

const pair = (a, b) => [a, b].sort().join(" ");

function cable(link, a, b, used, now, width, number) {
  const [p, q] = [middle(a), middle(b)];
  const beside = p.x === q.x && Math.abs(p.y - q.y) > a.height + GAP + 1; // another card is in between
  const bend = beside ? { x: width - 4, y: (p.y + q.y) / 2 } : { x: (p.x + q.x) / 2, y: (p.y + q.y) / 2 };
  const path = beside ? `M${p.x} ${p.y}Q${bend.x * 1.2} ${bend.y} ${q.x} ${q.y}` : `M${p.x} ${p.y}L${q.x} ${q.y}`;
  const lies = Math.abs(p.x - q.x) > Math.abs(p.y - q.y); // its labels are above and below it
  const words = linkWords(link) || `link ${UNKNOWN}`;
  const took = used && now.ranks.length === 2 ? now.group?.fabric?.collective_us : null;
  const crowded = !used && number > 3; // the list has all labels
  const latency = took ? `sync ${micros(took)}` : link.trip_us ? `round trip ${micros(link.trip_us)}` : "";
  const lines = beside || crowded ? [] : [words, latency].filter(Boolean);
  return [
    svg("path", { d: path, class: used ? "cable used" : "cable", "data-kind": link.rdma ? "rdma" : link.network }),
    ...lines.map((line, i) => svg("text", { x: bend.x, y: bend.y + (lies ? [-8, 19][i] : [-3, 14][i]), class: "label" }, line)),
  ];
}

const middle = (card) => ({ x: card.x + card.width / 2, y: card.y + card.height / 2 });

// --- Macs and ranks ---------------------------------------------------------------------------------------

function machine({ node, ranks, x, y, width, height }, now) {
  const about = [node.chip, node.memory_bytes ? bytes(node.memory_bytes) : ""].filter(Boolean).join(", ");
  const roles = [node.self ? "this Mac" : macWord(node.state), node.coordinator ? "coordinator" : ""].filter(Boolean);
  return svg(
    "g",
    { class: "machine", "data-state": node.state, transform: `translate(${x} ${y})` },
    svg("rect", { width, height, rx: 10, class: "case" }),
    svg("text", { x: 14, y: 24, class: "name" }, cut(node.name, (width - 28) / 9.6)),
    svg("text", { x: 14, y: 43, class: "small" }, cut(roles.join(", "), (width - 28) / 6.4)),
    svg("text", { x: 14, y: 60, class: "small" }, cut(about || `chip and memory ${UNKNOWN}`, (width - 28) / 6.4)),
    ...ranks.map((rank, i) => rankRow(rank, i, ranks.length > 1 ? width - 44 : width - 20, now)),
    ...(ranks.length ? [] : [svg("text", { x: 14, y: HEAD + 22, class: "small" }, "not used now")]),
    ...within(ranks, width, now),
  );
}

function rankRow(rank, i, width, now) {
  const phase = phaseWord(rank.phase ?? (now.ready ? "serving" : now.state));
  const memory = rank.memory_bytes === null ? `memory ${UNKNOWN}` : bytes(rank.memory_bytes);
  const works = now.ready ? rank.phase : now.state;
  return svg(
    "g",
    { class: "rank", "data-phase": works, transform: `translate(10 ${HEAD + i * ROW})` },
    svg("rect", { width, height: ROW - 6, rx: 6 }),
    svg("text", { x: 10, y: 19 }, now.ranks.length > 1 ? `${rank.rank}` : ""),
    svg("text", { x: now.ranks.length > 1 ? 28 : 10, y: 19, class: "small" }, `${phase} · ${memory}`),
  );
}

/** Return the path between ranks of one machine, along its right edge. */
function within(ranks, width, now) {
  const row = new Map(ranks.map((rank, i) => [rank.rank, HEAD + i * ROW + (ROW - 6) / 2]));
  const edge = width - 34;
  return (now.group?.pairs ?? [])
    .filter(([a, b]) => row.has(a) && row.has(b))
    .map(([a, b]) => {
      const out = edge + 12 + 8 * Math.min(Math.abs(a - b), 2);
      return svg("path", { d: `M${edge} ${row.get(a)}C${out} ${row.get(a)} ${out} ${row.get(b)} ${edge} ${row.get(b)}`, class: "cable used", "data-kind": "loopback" });
    });
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, Math.max(Math.floor(most) - 1, 1))}…` : text);
