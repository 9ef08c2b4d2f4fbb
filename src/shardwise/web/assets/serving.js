// The answer about serving: what fits, how fast it is, and what a step of all sequences is spent on.
import { legend } from "./charts.js";
import { h, number, s } from "./dom.js";

const PIECES = { weight_bytes: ["m-parameters", "weights"], cache_bytes: ["m-activations", "KV cache"], workspace_bytes: ["m-buffers", "workspace"] };
const PARTS = {
  weights: ["t-compute", "reading the weights"], cache: ["t-data_parallel", "reading the KV cache"], arithmetic: ["t-recompute", "arithmetic"],
  all_reduce: ["t-tensor_parallel", "all-reduces"], launch: ["t-host", "kernel starts"],
};
const MARKS = { true: ["✓", "fits"], false: ["✗", "does not fit"], null: ["?", "unknown whether it fits"] };

export function headline(answer) {
  const { document: found } = answer, index = found.recommended, best = found.options[index], path = `options.${index}`;
  const where = [number(answer, "cluster.devices"), ` × ${found.cluster.device_name}`], what = [number(answer, "concurrency"), found.concurrency === 1 ? " sequence of " : " sequences of ", number(answer, "context"), " tokens"];
  if (!best) return h("section", { class: "card hero bad" }, h("h2", {}, "Nothing fits on ", where, " for ", what, "."),
    h("p", {}, found.answer[0]), h("ul", { class: "advice" }, found.advice.map((line) => h("li", {}, h("code", {}, line)))));
  const figure = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return h("section", { class: "card hero good" },
    h("h2", {}, h("span", { class: "verdict" }, "Serve with "), h("b", {}, `tp=${best.tp}`), " on ", where, ": ", what, ", ", best.tokens_per_s === null ? "at unknown speed" : [number(answer, `${path}.tokens_per_s`), " tokens/s"], "."),
    h("p", {}, found.answer.join(" ")),
    h("dl", { class: "figures" },
      figure("tokens/s, all sequences", number(answer, `${path}.tokens_per_s`), best.tokens_per_s === null ? null : h("small", {}, number(answer, `${path}.tokens_per_s_low`), " to ", number(answer, `${path}.tokens_per_s_high`), ", 8 of 10 times")),
      figure("tokens/s of a sequence", number(answer, `${path}.tokens_per_s_each`), h("small", {}, number(answer, `${path}.step_s`), " a step")),
      figure("to the first token", number(answer, `${path}.first_token_s`), h("small", {}, "of a prompt that fills the context")),
      figure("sequences that fit", number(answer, `${path}.most_sequences`), h("small", {}, number(answer, "cache_bytes_of_a_sequence"), " of KV cache each")),
      figure("a million tokens", number(answer, `${path}.dollars_per_million_tokens`), h("small", {}, number(answer, "cluster.price_per_device_hour"), " a GPU hour"))));
}

function bar(option, most) {
  const drawn = s("svg", { class: "bar", viewBox: "0 0 100 14", preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const [name, [css]] of Object.entries(PIECES)) {
    const width = Math.max(0, Math.min((100 * option[name]) / most, 100 - at));
    drawn.append(s("rect", { class: css, x: at, y: 2, width, height: 10 }));
    at += width;
  }
  if (option.usable_bytes) drawn.append(s("rect", { class: "limit", x: Math.min(99.5, (100 * option.usable_bytes) / most), y: 0, width: 0.5, height: 14 }));
  return drawn;
}

export function ways(answer) {
  const { document: found } = answer, whole = (option) => option.weight_bytes + option.cache_bytes + option.workspace_bytes;
  const limit = found.options[0].usable_bytes, most = Math.max(1, limit ? 1.04 * limit : 0, ...found.options.map((one) => Math.min(whole(one), 1.3 * (limit || Infinity))));
  const head = ["", "tp", "replicas", "memory of a GPU", "weights", "KV cache", "at most", "first token", "tokens/s", "of each", "$/M tokens"];
  return h("section", { class: "card", id: "ways" }, h("h2", {}, "Every degree of tensor parallel"),
    h("p", { class: "soft" }, limit ? ["The line is what an engine may use of the GPU's memory, ", number(answer, "options.0.usable_bytes"), "."] : "The GPU's memory is unknown.", " “At most” is the number of sequences with their full context."),
    legend(Object.values(PIECES)),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Every degree of tensor parallel" }, h("table", { class: "ways" },
      h("thead", {}, h("tr", {}, head.map((name) => (name ? h("th", { scope: "col" }, name) : h("th", { scope: "col" }, h("span", { class: "hidden" }, "verdict")))))),
      h("tbody", {}, found.options.map((option, i) => {
        const [mark, means] = found.recommended === i ? ["▶", "recommended"] : MARKS[option.fits], cell = (name) => h("td", {}, number(answer, `options.${i}.${name}`));
        return h("tr", { class: `${found.recommended === i ? "best" : ""} ${option.fits === false ? "no" : ""}` },
          h("td", { class: "mark" }, h("span", { "aria-hidden": "true" }, mark), h("span", { class: "hidden" }, means)),
          h("th", { scope: "row" }, number(answer, `options.${i}.tp`)), cell("replicas"), h("td", { class: "drawn" }, bar(option, most)),
          ["weight_bytes", "cache_bytes", "most_sequences", "first_token_s", "tokens_per_s", "tokens_per_s_each", "dollars_per_million_tokens"].map(cell));
      })))),
    h("ul", { class: "soft advice" }, found.notes.map((line) => h("li", {}, line))));
}

export function step(answer) {
  const { document: found } = answer, index = found.recommended ?? 0, option = found.options[index], parts = option.step_parts_s;
  if (!parts) return null;
  const drawn = s("svg", { class: "step", viewBox: "0 0 1000 34", preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const [name, [css]] of Object.entries(PARTS)) {
    const width = (1000 * parts[name]) / option.step_s;
    if (width > 0) drawn.append(s("rect", { class: css, x: at, y: 0, width: Math.max(width - 1, 0.6), height: 34 }));
    at += width;
  }
  return h("section", { class: "card" }, h("h2", {}, "One step of ", h("b", {}, `tp=${option.tp}`), ": a token for each sequence"), drawn,
    h("ul", { class: "legend wide" }, Object.entries(PARTS).filter(([name]) => parts[name] > 0).map(([name, [css, text]]) =>
      h("li", {}, h("i", { class: `swatch ${css}` }), `${text} `, number(answer, `options.${index}.step_parts_s.${name}`)))));
}

export function clusters(list, at, choose) {
  if (list.length < 2) return null;
  const head = ["cluster", "tp", "tokens/s", "of each", "first token", "at most", "a million tokens"];
  const names = ["tp", "tokens_per_s", "tokens_per_s_each", "first_token_s", "most_sequences", "dollars_per_million_tokens"];
  return h("section", { class: "card" }, h("h2", {}, "Clusters side by side"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Clusters side by side" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, list.map(({ text, answer, asked }, i) => {
      const name = h("th", { scope: "row" }, h("button", { type: "button", class: "link", "aria-current": i === at ? "true" : null, onclick: () => choose(i) }, text));
      const why = !answer ? "searching…" : answer.problems.length ? answer.problems.join("; ") : answer.document.recommended === null ? "nothing fits" : "";
      if (why) return h("tr", {}, name, h("td", { colspan: names.length }, why));
      return h("tr", { "data-question": JSON.stringify(asked) }, name, names.map((one) => h("td", {}, number(answer, `options.${answer.document.recommended}.${one}`))));
    })))));
}

export function honest(answer, docs) {
  const link = (page, text) => (docs ? h("a", { href: `docs/${page}` }, text) : text);
  return h("section", { class: "card", id: "trust" }, h("h2", {}, "How far to trust these figures"),
    h("p", {}, "Weights and KV cache are counted exactly. Speed is a roofline whose constants were fitted on published measurements; the interval covers 8 of 10 of them. ",
      "Nothing here was measured on a GPU by this project. ", link("serving.html", "What is counted, and how right it is"), "."));
}
