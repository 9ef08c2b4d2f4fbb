// The answer: a sentence first, then why and why not.
import { CATEGORIES, PARTS, curve, legend, memoryBar, step } from "./charts.js";
import { h, number } from "./dom.js";

const MARKS = { true: ["✓", "fits"], false: ["✗", "does not fit"], null: ["?", "unknown whether it fits"] };

export function problems(lines) {
  return h("section", { class: "card bad" }, h("h2", {}, "That question has no answer yet"), h("ul", {}, lines.map((line) => h("li", {}, line))));
}

export function headline(answer, { quick }) {
  const { document: found } = answer, index = found.recommended ?? 0, best = found.candidates[index], path = `candidates.${index}`;
  const fits = found.recommended !== null;
  const where = [number(answer, "cluster.devices"), ` × ${found.cluster.device_name}`];
  const title = !fits && !best ? ["Nothing fits on ", where, "."]
    : fits ? [h("span", { class: "verdict" }, best.runnable ? "Use " : "Plan "), h("b", {}, best.strategy), " on ", where, ": ",
        number(answer, `${path}.memory_bytes.device`), " of ", number(answer, "cluster.device_memory_bytes"), " on each, ",
        best.step_time_s === null ? "in unknown time" : [number(answer, `${path}.step_time_s`), " a step"], "."]
      : quick || found.candidates.length === 1 ? [h("b", {}, best.strategy), " does not fit on ", where, ": it needs ", number(answer, `${path}.memory_bytes.device`), ", ", number(answer, "cluster.usable_bytes"), " usable."]
        : ["Nothing fits on ", where, ". The nearest, ", h("b", {}, nearest(found).strategy), ", needs ", number(answer, `candidates.${found.candidates.indexOf(nearest(found))}.memory_bytes.device`), ", ", number(answer, "cluster.usable_bytes"), " usable."];
  return h("section", { class: `card hero ${fits ? "good" : "bad"}` },
    h("h2", {}, title),
    !quick && answer.sentences.length ? h("p", {}, answer.sentences.join(" ")) : null,
    fits ? figures(answer, path, best) : null,
    !quick && answer.batch ? h("p", { class: "soft" }, answer.batch) : null);
}

const nearest = (found) => found.candidates.reduce((least, one) => (one.memory_bytes.device < least.memory_bytes.device ? one : least));

// of what a sample is: an image has no tokens
const speedOf = (one) => (one.tokens_per_s_per_device === null && one.samples_per_s_per_device !== null ? ["samples/s per GPU", "samples_per_s_per_device"] : ["tokens/s per GPU", "tokens_per_s_per_device"]);

function figures(answer, path, best) {
  const figure = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, value)), [speed, rate] = speedOf(best);
  return h("dl", { class: "figures" },
    figure("memory per GPU", number(answer, `${path}.memory_bytes.device`), h("small", {}, number(answer, "cluster.usable_bytes"), " usable")),
    figure("time of a step", number(answer, `${path}.step_time_s`), best.step_time_s === null ? null :
      h("small", {}, number(answer, `${path}.step_time_low_s`), " to ", number(answer, `${path}.step_time_high_s`), ", 8 of 10 times")),
    figure(speed, number(answer, `${path}.${rate}`), h("small", {}, "MFU ", number(answer, `${path}.mfu`))),
    figure("a million tokens", number(answer, `${path}.dollars_per_million_tokens`), h("small", {}, number(answer, "cluster.price_per_device_hour"), " a GPU hour")),
    best.hours === null ? null : figure("whole run", number(answer, `${path}.hours`), h("small", {}, number(answer, `${path}.cost`))));
}

export function advice(answer) {
  const { document: found } = answer;
  const part = (title, lines) => (lines.length ? [h("h2", {}, title), h("ul", { class: "advice" }, lines.map((line) => h("li", {}, commandLast(line))))] : null);
  const lines = [part("What would make it fit", found.advice), part("Cheaper, if it is what you want", found.other_trainings), part("Filled in for you", found.notes)].filter(Boolean);
  return lines.length ? h("section", { class: "card" }, lines) : null;
}

function commandLast(line) {
  const at = line.indexOf(": shardwise ");
  return at < 0 ? line : [line.slice(0, at + 1), " ", h("code", {}, line.slice(at + 2))];
}

export function clusters(list, at, choose) {
  if (list.length < 2) return null;
  const head = ["cluster", "strategy", "memory per GPU", "a step", "tokens/s per GPU", "a million tokens", "whole run"];
  return h("section", { class: "card" }, h("h2", {}, "Clusters side by side"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Clusters side by side" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, list.map(({ text, answer, asked }, i) => {
      const name = h("th", { scope: "row" }, h("button", { type: "button", class: "link", "aria-current": i === at ? "true" : null, onclick: () => choose(i) }, text));
      if (!answer) return h("tr", {}, name, h("td", { colspan: 6 }, "searching…"));
      if (answer.problems.length) return h("tr", {}, name, h("td", { colspan: 6 }, answer.problems.join("; ")));
      const found = answer.document, index = found.recommended ?? 0, cell = (path) => h("td", {}, number(answer, `candidates.${index}.${path}`));
      if (found.recommended === null) return h("tr", {}, name, h("td", { colspan: 6 }, "nothing fits"));
      return h("tr", { "data-question": JSON.stringify(asked) }, name, h("td", {}, found.candidates[index].strategy), ["memory_bytes.device", "step_time_s", "tokens_per_s_per_device", "dollars_per_million_tokens", "cost"].map(cell));
    })))));
}

export function strategies(answer, { open, pin, pinned }) {
  const { document: found } = answer, cluster = found.cluster;
  const limit = cluster.device_memory_bytes ?? 0;
  const most = Math.max(limit * 1.04, ...found.candidates.map((one) => Math.min(one.memory_bytes.device, 1.3 * (limit || Infinity))));
  const shown = [...CATEGORIES.slice(0, 7), "reserve", "context"];
  const rows = found.candidates.map((candidate, i) => row(answer, candidate, i, { most, open, pin, pinned }));
  return h("section", { class: "card", id: "strategies" }, h("h2", {}, "Every strategy, at its best"),
    h("p", { class: "soft" }, number(answer, "considered"), " plans considered. The line is the GPU's memory", limit ? [", ", number(answer, "cluster.device_memory_bytes")] : ", which is unknown", ". Open a row for its arithmetic."),
    legend(shown.map((name) => [`m-${name}`, name === "reserve" ? "allocator" : name])),
    h("div", { class: "head", "aria-hidden": "true" }, ["", "strategy", "memory of the fullest GPU", "", "step", "MFU", "$/M tokens"].map((name) => h("span", {}, name))),
    h("div", { class: "rows" }, rows));
}

function row(answer, candidate, i, { most, open, pin, pinned }) {
  const path = `candidates.${i}`, best = answer.document.recommended === i;
  const [mark, means] = best ? ["▶", "recommended"] : !candidate.runnable && candidate.fits !== false ? ["◇", "planned, not run by this version"] : MARKS[candidate.fits];
  const details = h("details", { class: `strategy ${best ? "best" : ""} ${candidate.fits === false ? "no" : ""}`, "data-strategy": candidate.strategy, open: open.has(candidate.strategy) },
    h("summary", {},
      h("span", { class: "mark", title: means }, h("span", { "aria-hidden": "true" }, mark), h("span", { class: "hidden" }, means)),
      h("span", { class: "name" }, ...candidate.strategy.split("+").flatMap((part, i) => (i ? [h("wbr"), `+${part}`] : [part]))),
      memoryBar(candidate, answer.document.cluster, most),
      h("span", { class: "gib" }, number(answer, `${path}.memory_bytes.device`)),
      h("span", { class: "time" }, number(answer, `${path}.step_time_s`)),
      h("span", { class: "mfu" }, number(answer, `${path}.mfu`)),
      h("span", { class: "money" }, number(answer, `${path}.dollars_per_million_tokens`))));
  const fill = () => { if (details.open && !details.querySelector(".inside")) details.append(inside(answer, candidate, i, { pin, pinned })); };
  details.addEventListener("toggle", () => { open[details.open ? "add" : "delete"](candidate.strategy); fill(); });
  fill();
  return details;
}

function inside(answer, candidate, i, { pin, pinned }) {
  const path = `candidates.${i}`, line = (name, where) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, number(answer, `${path}.${where}`)));
  const memory = candidate.memory_bytes, times = candidate.time_parts_s;
  const why = candidate.reason ? `Why not: ${candidate.reason}.` : answer.document.recommendation ? `Why: ${answer.document.recommendation}.` : "";
  return h("div", { class: "inside" },
    why ? h("p", {}, why) : null,
    candidate.why_not_runnable ? h("p", {}, `This version plans ${candidate.why_not_runnable} but does not run it.`) : null,
    h("p", { class: "soft" }, "micro batch ", number(answer, `${path}.micro_batch`), ", accumulation ", number(answer, `${path}.grad_accum`), `, recompute ${candidate.recompute}, ${candidate.precision}; `,
      Object.keys(candidate.dims).filter((axis) => candidate.dims[axis] > 1).map((axis) => [`${axis} `, number(answer, `${path}.dims.${axis}`), " "])),
    h("div", { class: "two" },
      h("table", {}, h("caption", {}, "Memory, each category at its own peak"), h("tbody", {},
        CATEGORIES.filter((name) => memory[name] !== 0).map((name) => line(name, `memory_bytes.${name}`)),
        line("live at the peak", "memory_bytes.allocated"), line("held by the allocator", "memory_bytes.reserved"), line("device", "memory_bytes.device"),
        memory.offloaded ? [line("offloaded by a rank", "memory_bytes.offloaded"), line("host memory of a node", "memory_bytes.host")] : null)),
      h("table", {}, h("caption", {}, "Time of a step"), h("tbody", {},
        times ? Object.entries(PARTS).filter(([name]) => times[name]).map(([name, text]) => line(text, `time_parts_s.${name}`)) : null,
        line("step", "step_time_s"), line("low", "step_time_low_s"), line("high", "step_time_high_s"), line(...speedOf(candidate))))),
    candidate.notes.length ? h("ul", { class: "soft" }, candidate.notes.map((note) => h("li", {}, note))) : null,
    h("button", { type: "button", onclick: () => pin(pinned ? "" : candidate.strategy) }, pinned ? "Consider every strategy again" : `Plan with ${candidate.strategy} only`));
}

export function timeline(answer, index) {
  const candidate = answer.document.candidates[index];
  return h("section", { class: "card" }, h("h2", {}, "One step of ", h("b", {}, candidate.strategy)),
    h("p", { class: "soft" }, "Communication counts only where no computation hides it; the order inside a step is not predicted."), step(answer, index));
}

export function curves(list) {
  return h("section", { class: "card" }, h("h2", {}, "If one number changed"), h("div", { class: "curves" }, list.map(({ title, points, limit, limitText, control }) => h("figure", {},
    h("figcaption", {}, h("h3", {}, title), control),
    curve(points, { title, limit, limitText }),
    h("details", { class: "more" }, h("summary", {}, "As a table"), h("table", {}, h("tbody", {}, points.map((point) =>
      h("tr", { "data-question": point.question ? JSON.stringify(point.question) : null }, h("th", { scope: "row" }, point.name), h("td", {}, point.cell ?? point.why ?? "…"))))))))));
}

export function takeAway(answer, copy) {
  const download = () => {
    const address = URL.createObjectURL(new Blob([answer.plan], { type: "application/toml" }));
    h("a", { href: address, download: "plan.toml" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  };
  return h("section", { class: "card", id: "take" }, h("h2", {}, "Take it with you"),
    h("p", { class: "soft" }, "The same answer on the command line", answer.plan ? [", and the plan for ", h("code", {}, "shardwise train --plan plan.toml")] : "", "."),
    h("div", { class: "command" }, h("pre", { tabindex: 0, role: "region", "aria-label": "Command line" }, h("code", { id: "command" }, answer.command)), h("button", { type: "button", onclick: (event) => copy(answer.command, event.target) }, "Copy")),
    answer.plan ? h("details", { class: "more" }, h("summary", {}, "plan.toml"), h("pre", { id: "toml", tabindex: 0, role: "region", "aria-label": "plan.toml" }, answer.plan)) : null,
    answer.plan ? h("p", {}, h("button", { type: "button", onclick: download }, "Download plan.toml")) : null);
}

export function honest(answer, docs) {
  const link = (page, text) => (docs ? h("a", { href: `docs/${page}` }, text) : text);
  return h("section", { class: "card", id: "trust" }, h("h2", {}, "How far to trust these figures"),
    h("p", {}, "Parameters, gradients and optimizer state are counted exactly. Peak memory and step time are predictions; the interval of a time covers 8 of 10 published measurements. ",
      "Nothing here was measured on a GPU by this project. ", link("how-it-counts.html", "How memory and time are predicted"), ", ", link("choosing-a-plan.html", "the rules of thumb"), "."),
    answer.document.model.unknown.length ? h("ul", {}, answer.document.model.unknown.map((line) => h("li", {}, `unknown: ${line}`))) : null);
}
