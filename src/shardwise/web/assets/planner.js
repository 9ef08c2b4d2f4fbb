// The planner page: a form, two engines (one answers while a slider moves, one searches everything), and the answer.
import { picture } from "./charts.js";
import { $, h } from "./dom.js";
import { Engine } from "./engine.js";
import * as result from "./result.js";
import * as serving from "./serving.js";
import { FLAGS, RARE, SERVING, WORDS, clusterText, devicesOf, fromHash, question, toHash } from "./state.js";

const full = new Engine();
let fast = null; // loads once the first answer is there
let lists = { models: [], gpus: [], optimizers: [] };
let docs = false;
let state = fromHash(location.hash);
const shown = { key: "", round: 0, answer: null, others: new Map(), points: new Map(), metrics: ["tokens_per_s_per_device", "memory_bytes.device"] };
const open = new Set();
let round = 0;

const METRICS = {
  tokens_per_s_per_device: "tokens/s per GPU", efficiency: "efficiency", mfu: "MFU", dollars_per_million_tokens: "$ per million tokens",
  step_time_s: "time of a step", "memory_bytes.device": "memory per GPU",
};
const at = (value, path) => path.split(".").reduce((inner, key) => inner?.[key], value);
const key = (asked) => JSON.stringify(asked) + (state.config ?? "");

// ---- from the form to the state, and back

function fill() {
  const cluster = state.clusters[state.at];
  $("model").value = state.config === null ? state.model : configName();
  $("gpu").value = [...$("gpu").options].some((one) => one.value === cluster.gpu) ? cluster.gpu : "";
  for (const name of ["devices", "link", "network"]) $(name).value = cluster[name];
  for (const name of [...WORDS, ...SERVING]) $(name).value = state[name];
  for (const name of FLAGS) $(name).checked = state[name];
  if (WORDS.slice(3).some((name) => state[name] && !RARE.includes(name)) || FLAGS.some((name) => state[name])) $("more").open = true;
  if (RARE.some((name) => state[name])) $("more").open = $("rare").open = true;
  for (const name of ["train", "serve"]) {
    $(name).hidden = state.serve !== (name === "serve");
    $(`to-${name}`).setAttribute("aria-pressed", String(!$(name).hidden));
  }
  slide();
  $("clusters").replaceChildren(...state.clusters.map((one, i) =>
    h("button", { type: "button", "aria-pressed": String(i === state.at), onclick: () => choose(i) }, clusterText(one))),
  h("button", { type: "button", class: "quiet", disabled: state.clusters.length >= 4, onclick: addCluster }, "+ compare"),
  ...(state.clusters.length > 1 ? [h("button", { type: "button", class: "quiet", onclick: removeCluster }, "− remove")] : []));
}

function configName() {
  try { return `config.json (${JSON.parse(state.config)._name_or_path || JSON.parse(state.config).model_type || "yours"})`; } catch { return "config.json"; }
}

// The power of two that a slider shows for a number such as 8, 2x8 or 4k; null where there is none.
function power(text) {
  const number = /^\d+k$/i.test(text) ? parseInt(text, 10) * 1024 : text.split("x").reduce((product, n) => product * Number(n), 1);
  return number > 0 ? Math.round(Math.log2(number)) : null;
}

function given(name) { return state[name] || $(name).placeholder; } // of an empty field what the last answer took

function slide() {
  for (const [name, text] of [["devices", state.clusters[state.at].devices], ["seq_len", given("seq_len")], ["global_batch", given("global_batch")], ["context", state.context], ["concurrency", state.concurrency]]) {
    const slider = $(`${name}-slider`), found = power(text) ?? (text ? "" : slider.defaultValue);
    if (found !== "") slider.value = found; // of an empty field what is usual; while a word is typed the slider stays
    slider.setAttribute("aria-valuetext", `${text || "usual"} ${{ devices: "GPUs", seq_len: "tokens", global_batch: "samples", context: "tokens", concurrency: "sequences" }[name]}`);
  }
}

function change(changes, cluster = null) {
  const clusters = cluster === null ? state.clusters : state.clusters.map((one, i) => (i === state.at ? { ...one, ...cluster } : one));
  state = { ...state, ...changes, clusters };
  const hash = toHash(state);
  clearTimeout(change.timer); // browsers refuse a hundred changes of the address in a few seconds
  change.timer = setTimeout(() => history.replaceState(null, "", hash), 150);
  slide();
  [...$("clusters").children].slice(0, clusters.length).forEach((button, i) => { button.textContent = clusterText(clusters[i]); });
  ask();
}

function choose(i) { state = { ...state, at: i }; fill(); change({}); }
function addCluster() { state = { ...state, clusters: [...state.clusters, { ...state.clusters[state.at] }], at: state.clusters.length }; fill(); change({}); $("gpu").focus(); }
function removeCluster() { state = { ...state, clusters: state.clusters.filter((_, i) => i !== state.at), at: 0 }; fill(); change({}); $("clusters").firstChild.focus(); }

function takeConfig(text) {
  state = { ...state, config: text };
  full.config(text);
  fast?.config(text);
  fill();
  change({});
}

async function readFile(file) {
  if (!file) return;
  if (file.size > 1_000_000) return show({ problems: [`'${file.name}' has ${file.size} bytes; a config.json is far smaller`] });
  const text = await file.text();
  try { takeConfig(JSON.stringify(JSON.parse(text))); } catch { takeConfig(text); } // the engine says what is wrong
}

function listen() {
  $("model").addEventListener("input", (event) => { state.config = null; change({ model: event.target.value.trim() }); });
  $("model").addEventListener("focus", (event) => event.target.select());
  $("gpu").addEventListener("change", (event) => change({}, { gpu: event.target.value }));
  for (const name of ["devices", "network"]) $(name).addEventListener("input", (event) => change({}, { [name]: event.target.value }));
  $("link").addEventListener("change", (event) => change({}, { link: event.target.value }));
  for (const name of [...WORDS, ...SERVING]) $(name).addEventListener($(name).tagName === "SELECT" ? "change" : "input", (event) => change({ [name]: event.target.value.trim() }));
  for (const name of FLAGS) $(name).addEventListener("change", (event) => change({ [name]: event.target.checked }));
  for (const name of ["train", "serve"]) $(`to-${name}`).addEventListener("click", () => { state = { ...state, serve: name === "serve" }; fill(); change({}); });
  for (const name of ["devices", "seq_len", "global_batch", "context", "concurrency"])
    $(`${name}-slider`).addEventListener("input", (event) => {
      const text = String(2 ** Number(event.target.value));
      $(name).value = text;
      if (name === "devices") change({}, { devices: text }); else change({ [name]: text });
    });
  $("question").addEventListener("submit", (event) => event.preventDefault());
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", (event) => readFile(event.target.files[0]));
  const drop = document.body;
  drop.addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
  drop.addEventListener("dragleave", () => $("drop").classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); $("drop").classList.remove("over"); readFile(event.dataTransfer.files[0]); });
  $("share").addEventListener("click", (event) => { history.replaceState(null, "", toHash(state)); copy(location.href, event.target); });
  $("to-whole").firstChild.addEventListener("click", (event) => { event.target.href = `index.html${toHash(state)}`; });
  addEventListener("hashchange", () => { state = fromHash(location.hash); if (state.config !== null) { full.config(state.config); fast?.config(state.config); } fill(); ask(); });
}

async function copy(text, button) {
  const before = button.textContent;
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select and copy it"; }
  setTimeout(() => { button.textContent = before; }, 1500);
}

// ---- asking

async function ask() {
  const mine = ++round, asked = question(state), now = key(asked);
  if (now === shown.key) show(shown.answer); // what this round cancelled still has to be asked below
  else {
    $("result").classList.add("stale");
    say(fast === null && !shown.answer ? "Loading the planner…" : "Searching…");
    quickly(mine, asked);
    const answer = await full.ask(asked);
    if (answer === null || mine !== round) return; // a newer question is on its way
    Object.assign(shown, { key: now, round: mine });
    show(answer);
    if (answer.problems.length) return;
  }
  startFast();
  compare(mine);
  extend(mine, shown.answer);
}

// The strategy that is shown, under the new question: an answer while the slider moves.
async function quickly(mine, asked) {
  const known = shown.answer?.document, strategy = state.strategy || known?.candidates?.[known.recommended ?? 0]?.strategy;
  if (!fast || !strategy || state.serve) return; // serving is answered at once
  const pinned = { ...asked, strategy };
  const quick = await fast.ask(pinned);
  if (quick === null || mine !== round || quick.problems.length || shown.round === mine) return; // the complete answer was faster
  document.body.dataset.quick = key(pinned);
  $("result").firstElementChild?.replaceWith(result.headline(quick, { quick: true }));
  say(`${strategy} at once; searching the other strategies…`);
}

async function compare(mine) {
  for (const cluster of state.clusters) {
    const asked = question(state, cluster), now = key(asked);
    if (mine !== round) return;
    if (!shown.others.has(now)) shown.others.set(now, now === shown.key ? shown.answer : await full.ask(asked, { later: true }));
    if (shown.others.get(now) === null) shown.others.delete(now);
  }
  if (mine === round && state.clusters.length > 1) draw();
  while (shown.others.size > 64) shown.others.delete(shown.others.keys().next().value);
}

async function extend(mine, answer) {
  const found = answer.document;
  if (!found?.candidates?.length) return;
  await startFast();
  const strategy = found.candidates[found.recommended ?? 0].strategy;
  for (const point of [...devicePoints(strategy), ...lengthPoints(strategy)]) {
    const now = key(point.question);
    if (shown.points.has(now)) continue;
    let reply = null;
    while (reply === null) { // a slider's question goes first
      if (mine !== round) return;
      reply = await fast.ask(point.question, { later: true });
    }
    shown.points.set(now, reply);
    while (shown.points.size > 400) shown.points.delete(shown.points.keys().next().value);
    if (mine === round) drawCurves();
  }
}

function startFast() {
  if (fast === null) {
    fast = new Engine();
    if (state.config !== null) fast.config(state.config);
    fast.ready.then(() => { document.body.dataset.fast = "ready"; }).catch(() => {});
  }
  return fast.ready.catch(() => {});
}

// ---- showing

function say(text) { if ($("status").textContent !== text) $("status").textContent = text; }

function show(answer) {
  document.body.dataset.answered = key(question(state));
  $("result").classList.remove("stale");
  if (answer.problems.length) {
    say("");
    $("result").replaceChildren(result.problems(answer.problems));
    shown.key = "";
    return;
  }
  shown.answer = answer;
  say("");
  facts(answer);
  draw();
}

function facts(answer) {
  const { model, cluster } = answer.document;
  $("model-facts").textContent = `${answer.texts["model.parameters"]} parameters, ${answer.texts["model.blocks"]} blocks`
    + (model.max_seq_len === null ? "" : `, made for ${answer.texts["model.max_seq_len"]} tokens`);
  $("gpu-facts").textContent = `${answer.texts["cluster.device_memory_bytes"]}, ${cluster.price_per_device_hour === null ? "price unknown" : `${answer.texts["cluster.price_per_device_hour"]} an hour`}`;
  if (![...$("gpu").options].some((one) => one.value === state.clusters[state.at].gpu)) $("gpu").value = cluster.device_name;
  $("picture").replaceChildren(picture(answer));
  for (const name of ["seq_len", "global_batch"]) $(name).placeholder = answer.document.workload?.[name] ?? $(name).placeholder;
  slide();
}

function draw() {
  const answer = shown.answer, pinned = Boolean(state.strategy);
  const list = state.clusters.map((cluster) => { const asked = question(state, cluster); return { text: clusterText(cluster), asked, answer: key(asked) === shown.key ? answer : shown.others.get(key(asked)) }; });
  if (answer.serving) {
    $("result").replaceChildren(...[
      serving.headline(answer), serving.clusters(list.filter((one) => !one.answer || one.answer.serving), state.at, choose), serving.ways(answer), serving.step(answer),
      result.takeAway(answer, copy), serving.honest(answer, docs),
    ].filter(Boolean));
    return;
  }
  const focused = document.activeElement?.closest?.("#result [data-strategy]")?.dataset.strategy;
  $("result").replaceChildren(...[
    result.headline(answer, { quick: false }),
    answer.document.recommended === null ? result.advice(answer) : null,
    result.clusters(list, state.at, choose),
    answer.document.candidates.length ? result.strategies(answer, { open, pin: (strategy) => { $("strategy").value = strategy; $("more").open = true; change({ strategy }); }, pinned }) : null,
    answer.document.candidates.length ? result.timeline(answer, answer.document.recommended ?? 0) : null,
    h("div", { id: "curves" }),
    answer.document.recommended === null ? null : result.advice(answer),
    result.takeAway(answer, copy),
    result.honest(answer, docs),
  ].filter(Boolean));
  if (focused) [...document.querySelectorAll("#result [data-strategy]")].find((one) => one.dataset.strategy === focused)?.querySelector("summary").focus();
  drawCurves();
}

function devicePoints(strategy) {
  const cluster = state.clusters[state.at], total = devicesOf(cluster), per = lists.gpus.find((one) => one.name === cluster.gpu)?.per_node ?? 8;
  const centre = Math.min(Math.max(Math.round(Math.log2(total || 1)), 3), 9);
  return [-3, -2, -1, 0, 1, 2, 3].map((offset) => 2 ** (centre + offset)).map((devices) => ({
    label: String(devices), name: `${devices} GPU${devices > 1 ? "s" : ""}`, here: devices === total,
    question: question(state, { ...cluster, devices: devices === total ? cluster.devices : devices <= per ? String(devices) : `${devices / per}x${per}` }, { strategy }),
  }));
}

function lengthPoints(strategy) {
  if (!shown.answer.document.workload.seq_len) return [];
  const here = shown.answer.document.workload.seq_len, centre = Math.min(Math.max(Math.round(Math.log2(here)), 10), 14);
  return [-3, -2, -1, 0, 1, 2, 3].map((offset) => 2 ** (centre + offset)).map((length) => ({
    label: length >= 1024 ? `${length / 1024}k` : String(length), name: `${length} tokens`, here: length === here, question: question(state, undefined, { strategy, seq_len: String(length) }),
  }));
}

function valued(point, metric) {
  const reply = shown.points.get(key(point.question));
  if (!reply) return { ...point, y: null, pending: true, cell: "…" };
  const found = reply.document?.candidates[0];
  if (!found) return { ...point, y: null, cell: reply.problems.join("; ") };
  const text = reply.texts[`candidates.0.${metric}`];
  return { ...point, y: at(found, metric), text: text ?? "unknown", fits: found.fits, cell: [h("span", { class: "num", "data-path": `candidates.0.${metric}` }, text), found.fits === false ? ", does not fit" : ""] };
}

// Tokens a second and GPU beside those of the first point that fits: what the page works out itself.
function efficiency(points) {
  const all = points.map((point) => valued(point, "tokens_per_s_per_device")), first = all.find((point) => point.y && point.fits) ?? all.find((point) => point.y);
  return all.map((point) => {
    if (!point.y) return point;
    const y = point.y / first.y, text = `${(100 * y).toFixed(0)}%`;
    return { ...point, y, text, cell: `${text} of ${first.name}${point.fits === false ? ", does not fit" : ""}` };
  });
}

function drawCurves() {
  const box = $("curves"), answer = shown.answer;
  if (!box || !answer?.document.candidates?.length) return;
  const { document: found, texts } = answer, strategy = found.candidates[found.recommended ?? 0].strategy;
  const limit = { limit: found.cluster.device_memory_bytes, limitText: `memory of a GPU, ${texts["cluster.device_memory_bytes"]}` };
  const list = [["GPUs, same batch", devicePoints(strategy)], ["tokens per sample", lengthPoints(strategy)]].filter(([, points]) => points.length).map(([over, points], i) => {
    const metric = shown.metrics[i];
    const choose = (event) => { shown.metrics[i] = event.target.value; drawCurves(); };
    return {
      title: `${strategy} over ${over}`, points: metric === "efficiency" ? efficiency(points) : points.map((point) => valued(point, metric)),
      control: h("select", { "aria-label": `What the curve over ${over} shows`, onchange: choose }, Object.entries(METRICS).map(([value, name]) => h("option", { value, selected: value === metric }, name))),
      ...(metric === "memory_bytes.device" ? limit : {}),
    };
  });
  const wasOpen = [...box.querySelectorAll("details")].map((one) => one.open), focused = [...box.querySelectorAll("select")].indexOf(document.activeElement);
  box.replaceChildren(result.curves(list));
  box.querySelectorAll("select")[focused]?.focus();
  box.querySelectorAll("details").forEach((one, i) => { one.open = wasOpen[i] ?? false; });
}

// ---- starting

async function start() {
  listen();
  fill();
  if (state.config !== null) full.config(state.config);
  fetch("site.json").then((reply) => reply.json()).then((facts) => {
    docs = facts.docs;
    $("to-docs").hidden = !docs;
    $("to-machine").hidden = !facts.machine;
    $("version").textContent = `Shardwise ${facts.version}.`;
  }).catch(() => {});
  ask();
  try { lists = await full.ready; } catch (error) { return say(`The planner could not be loaded: ${error.message}. It needs WebAssembly and about 8 MB.`); }
  $("models").replaceChildren(...lists.models.map((one) => h("option", { value: one.name }, `${one.parameters} parameters`)));
  $("gpu").replaceChildren(...lists.gpus.map((one) => h("option", { value: one.name }, `${one.name}, ${one.memory}`)));
  $("optimizer").replaceChildren(h("option", { value: "" }, "adamw"), ...lists.optimizers.filter((one) => one !== "adamw").map((one) => h("option", {}, one)));
  $("program").append(...lists.programs.map((one) => h("option", {}, one)));
  fill();
}

// For tests: whether the answer to an address is shown, and the document behind it.
globalThis.shardwise = {
  isShown: (hash) => document.body.dataset.answered === keyOf(hash), answer: () => shown.answer, crash: () => full.crash(), hash: () => toHash(state),
};
function keyOf(hash) {
  const other = fromHash(hash);
  return JSON.stringify(question(other)) + (other.config ?? "");
}
start();
