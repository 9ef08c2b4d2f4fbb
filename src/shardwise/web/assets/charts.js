// Pictures from the document: memory bars, a step, curves, a cluster. Every one has its numbers as text beside it.
import { h, number, s } from "./dom.js";

export const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries", "context"];
export const PARTS = {
  compute: "compute", recompute: "recompute", data_parallel: "data-parallel communication", tensor_parallel: "tensor-parallel communication",
  context_parallel: "context-parallel communication", pipeline: "pipeline bubble and transfers", optimizer: "optimizer", offload: "offload", host: "host",
};

// Pieces of the peak: what is held all along, then what else is live at the peak, then the allocator's reserve.
// Categories peak at different moments, so the pieces are cut where the peak is reached.
export function pieces(memory) {
  const found = [], live = memory.allocated ?? memory.device - memory.context;
  let left = live;
  for (const name of ["parameters", "optimizer", "gradients", "buffers", "activations", "logits", "temporaries"]) {
    const bytes = Math.min(left, memory[name] ?? 0);
    if (bytes > 0) found.push([name, bytes]);
    left -= bytes;
  }
  if (left > 0) found.push(["temporaries", left]);
  if (memory.reserved > live) found.push(["reserve", memory.reserved - live]);
  if (memory.context) found.push(["context", memory.context]);
  return found;
}

export function memoryBar(candidate, cluster, most, height = 14) {
  const memory = candidate.memory_bytes, limit = cluster.device_memory_bytes, scale = 100 / most;
  const bar = s("svg", { class: "bar", viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const [name, bytes] of pieces(memory)) {
    const width = Math.min(bytes * scale, 100 - at);
    bar.append(s("rect", { class: `m-${name}`, x: at, y: 2, width, height: height - 4 }));
    at += width;
  }
  if (limit && memory.device > limit) {
    const from = limit * scale;
    bar.append(s("rect", { class: "over", x: from, y: 2, width: Math.max(0, Math.min(100, memory.device * scale) - from), height: height - 4 }));
  }
  if (limit) bar.append(s("rect", { class: "limit", x: Math.min(99.5, limit * scale), y: 0, width: 0.5, height }));
  return bar;
}

export const legend = (names) => h("ul", { class: "legend" }, names.map(([name, text]) => h("li", {}, h("i", { class: `swatch ${name}` }), text)));

// One step: what its seconds are spent on. The order inside of a step is not predicted.
export function step(answer, index) {
  const candidate = answer.document.candidates[index], parts = candidate.time_parts_s, path = `candidates.${index}.time_parts_s`;
  if (!parts) return h("p", { class: "unknown" }, "The time of a step is unknown: the speed of this GPU or of a link is.");
  const total = candidate.step_time_s, bar = s("svg", { class: "step", viewBox: "0 0 1000 34", preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const name of Object.keys(PARTS)) {
    const width = (parts[name] / total) * 1000;
    if (width > 0) bar.append(s("rect", { class: `t-${name}`, x: at, y: 0, width: Math.max(width - 1, 0.6), height: 34 }));
    at += width;
  }
  const used = Object.entries(PARTS).filter(([name]) => parts[name] > 0);
  return h("div", {}, bar, h("ul", { class: "legend wide" }, used.map(([name, text]) =>
    h("li", {}, h("i", { class: `swatch t-${name}` }), `${text} `, number(answer, `${path}.${name}`)))));
}

// A curve over a list of points {x, label, y, text, fits}; a point without y is unknown and leaves a gap.
export function curve(points, { title, limit, limitText }) {
  const width = 560, height = 210, left = 14, right = 14, top = 34, bottom = 30;
  const known = points.filter((point) => point.y !== null && point.y !== undefined);
  const most = Math.max(...known.map((point) => point.y), limit ?? 0, 1e-12) * 1.06;
  const x = (i) => left + 26 + (i * (width - left - right - 52)) / Math.max(1, points.length - 1);
  const y = (value) => top + (1 - value / most) * (height - top - bottom);
  const chart = s("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  chart.append(s("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  if (limit) chart.append(
    s("line", { class: "limit-line", x1: left, x2: width - right, y1: y(limit), y2: y(limit) }),
    s("text", { class: "limit-text", x: left, y: y(limit) - 5 }, limitText));
  let path = "";
  points.forEach((point, i) => {
    if (point.y === null || point.y === undefined) { path += " "; return; }
    path += `${path === "" || path.endsWith(" ") ? "M" : "L"}${x(i).toFixed(1)},${y(point.y).toFixed(1)}`;
  });
  chart.append(s("path", { class: "line", d: path.trim().replaceAll(" ", "") }));
  points.forEach((point, i) => {
    chart.append(s("text", { class: "tick", x: x(i), y: height - 10, "text-anchor": "middle" }, point.label));
    if (point.y === null || point.y === undefined) {
      chart.append(s("text", { class: "tick none", x: x(i), y: height - bottom - 8, "text-anchor": "middle" }, point.pending ? "…" : "–"));
      return;
    }
    const crowded = i % 2 === 1 && points.some((one) => one.text?.length > 7); // neighbours would lie over each other
    const over = crowded || limit && Math.abs(y(point.y) - y(limit)) < 22 && point.y <= limit;
    chart.append(
      s("circle", { class: `point ${point.fits === false ? "no" : ""} ${point.here ? "here" : ""}`, cx: x(i), cy: y(point.y), r: point.here ? 6 : 4 }),
      s("text", { class: "value", x: x(i), y: y(point.y) + (over ? 20 : -11), "text-anchor": "middle" }, point.text));
  });
  return chart;
}

// Nodes, GPUs and links of a cluster; of many, the first ones and how many more there are.
export function picture(answer) {
  const cluster = answer.document.cluster, nodes = Math.min(cluster.nodes, 4), devices = Math.min(cluster.devices_per_node, 16);
  const columns = Math.min(devices, 4), rows = Math.ceil(devices / columns), size = 15, gap = 4;
  const nodeWidth = columns * (size + gap) + 12, nodeHeight = rows * (size + gap) + 12;
  const width = nodes * (nodeWidth + 16) - 16 + (cluster.nodes > nodes ? 44 : 0), wired = cluster.nodes > 1 ? 16 : 0;
  const drawn = s("svg", { class: "picture", viewBox: `0 0 ${Math.max(width, 60)} ${nodeHeight + wired}`, width: Math.max(width, 60), "aria-hidden": "true" });
  for (let n = 0; n < nodes; n++) {
    const left = n * (nodeWidth + 16);
    drawn.append(s("rect", { class: "node", x: left + 0.5, y: 0.5, width: nodeWidth - 1, height: nodeHeight - 1, rx: 6 }));
    if (wired) drawn.append(s("line", { class: "wire", x1: left + nodeWidth / 2, x2: left + nodeWidth / 2, y1: nodeHeight, y2: nodeHeight + 11 }));
    for (let d = 0; d < devices; d++)
      drawn.append(s("rect", { class: "gpu", x: left + 8 + (d % columns) * (size + gap), y: 8 + Math.floor(d / columns) * (size + gap), width: size, height: size, rx: 3 }));
  }
  if (wired) drawn.append(s("line", { class: "wire", x1: nodeWidth / 2, x2: width, y1: nodeHeight + 11, y2: nodeHeight + 11 }));
  if (cluster.nodes > nodes) drawn.append(s("text", { x: width - 38, y: nodeHeight / 2 + 4, class: "tick" }, `+ ${cluster.nodes - nodes}`));
  const links = [
    cluster.devices_per_node > 1 && ["inside a node: ", cluster.link ?? "link unknown", cluster.link_bytes_per_s !== null && [" ", number(answer, "cluster.link_bytes_per_s")]],
    cluster.nodes > 1 && ["between nodes: ", ...(cluster.network_bytes_per_s === null ? ["unknown"] : [number(answer, "cluster.network_bytes_per_s"), " per GPU"])],
  ].filter(Boolean);
  return h("figure", { class: "cluster-picture" }, drawn, h("figcaption", {},
    number(answer, "cluster.nodes"), cluster.nodes === 1 ? " node of " : " nodes of ", number(answer, "cluster.devices_per_node"), ` × ${cluster.device_name}`,
    links.map((line) => [h("br"), line])));
}
