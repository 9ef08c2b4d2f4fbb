// The question on the page, and its form in the address: option names of the command line, so that a link is an answer.
export const RARE = ["program", "weights", "accumulate", "reduce", "rounding", "fp8", "objective", "lora_rank", "lora_targets", "virtual_stages", "recompute_layers", "loss_chunks", "document_len", "framework_overhead"];
export const WORDS = ["seq_len", "global_batch", "tokens", "precision", "optimizer", "strategy", "micro_batch", "recompute", "loss", ...RARE];
export const FLAGS = ["compiled", "any_plan", "optimizer_in_backward", "offload_activations"];
export const SERVING = ["context", "concurrency", "quant", "kv_cache", "tp"];
const OPTIONS = { compiled: "compile", any_plan: "any" };
const MOST_CONFIG = 20000; // characters of a config.json in a link
const option = (name) => OPTIONS[name] ?? name.replaceAll("_", "-");

export const usual = () => ({
  model: "llama-3.1-8b", config: null, clusters: [{ gpu: "A100-SXM-80GB", devices: "8", link: "", network: "" }], at: 0,
  ...Object.fromEntries([...WORDS, ...SERVING].map((name) => [name, ""])), ...Object.fromEntries(FLAGS.map((name) => [name, false])),
  seq_len: "4096", global_batch: "64", serve: false,
});

export function clusterText({ devices, gpu, link, network }) {
  return `${devices.trim()}x${gpu}${link ? `@${link}` : ""}${network.trim() ? `/${network.trim()}` : ""}`;
}

export function readCluster(text) {
  const found = /^(?:(\d+(?:\s*[x×*]\s*\d+)?)\s*[x×*]\s*)?([^@/]+)(?:@([^/]*))?(?:\/(.*))?$/.exec(text.trim());
  return found && { devices: (found[1] ?? "1").replace(/\s*[x×*]\s*/, "x"), gpu: found[2].trim(), link: found[3] ?? "", network: found[4] ?? "" };
}

export const devicesOf = ({ devices }) => devices.split("x").reduce((product, n) => product * Number(n), 1);

// The words of `shardwise plan` for one of the clusters.
export function question(state, cluster = state.clusters[state.at], changes = {}) {
  const asked = { model: state.config === null ? state.model : "config.json", cluster: clusterText(cluster) };
  if (state.serve) asked.serve = "on";
  for (const name of state.serve ? SERVING : WORDS) if (state[name]) asked[name] = state[name];
  for (const name of state.serve ? [] : FLAGS) if (state[name]) asked[name] = "on";
  return { ...asked, ...changes };
}

export function toHash(state) {
  const words = new URLSearchParams();
  if (state.config === null) words.set("model", state.model);
  else if (state.config.length <= MOST_CONFIG) words.set("config", state.config);
  for (const cluster of state.clusters) words.append("cluster", clusterText(cluster));
  if (state.at) words.set("at", state.at);
  if (state.serve) words.set("serve", "on");
  for (const name of [...WORDS, ...SERVING]) if (state[name]) words.set(option(name), state[name]);
  for (const name of FLAGS) if (state[name]) words.set(option(name), "on");
  return `#${words}`;
}

export function fromHash(hash) {
  const state = usual(), words = new URLSearchParams(hash.replace(/^#/, ""));
  if (![...words.keys()].length) return state;
  if (words.has("model")) state.model = words.get("model");
  if (words.has("config")) state.config = words.get("config");
  const clusters = words.getAll("cluster").map(readCluster).filter(Boolean).slice(0, 4);
  if (clusters.length) state.clusters = clusters;
  state.at = Math.min(Math.max(0, Number(words.get("at")) || 0), state.clusters.length - 1);
  state.serve = words.get("serve") === "on";
  for (const name of [...WORDS, ...SERVING]) state[name] = words.get(option(name)) ?? "";
  for (const name of FLAGS) state[name] = words.get(option(name)) === "on";
  return state;
}
