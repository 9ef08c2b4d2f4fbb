// A worker with the planner. Of questions that wait, only the newest is asked; the others resolve to null.
const TRIES = 2; // workers in a row that end without an answer, until no other is started

export class Engine {
  #worker; #sent = new Map(); #next = 1; #waiting = { now: null, later: null }; #config = null; #letGo = false; #failures = 0; #why = null;
  #resolveReady; #rejectReady;

  constructor() {
    this.ready = new Promise((resolve, reject) => { this.#resolveReady = resolve; this.#rejectReady = reject; });
    this.ready.catch(() => {});
    this.#start();
  }

  #start() {
    this.#worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.#worker.onmessage = ({ data }) => {
      if (data.id === 0) return data.failed ? this.#failed(data.failed) : this.#resolveReady(data.reply);
      const one = this.#sent.get(data.id);
      if (!this.#sent.delete(data.id)) return;
      if (one.kind === "ask") this.#failures = 0;
      one.resolve(data.reply);
      this.#pump();
    };
    this.#worker.onerror = (event) => { event.preventDefault?.(); this.#failed(event.message || "it could not be loaded"); };
    if (this.#config !== null) this.#post("config", this.#config, () => {});
  }

  // Starts another worker. The question that was being answered is not asked again, nor is its config.json kept.
  #failed(why) {
    this.#worker.terminate();
    const lost = [...this.#sent.values()];
    this.#sent.clear();
    if (lost.some((one) => one.config)) { this.#config = null; this.#letGo = true; }
    if (++this.#failures < TRIES) this.#start();
    else {
      this.#why = why;
      this.#rejectReady(new Error(why));
      lost.push(...Object.values(this.#waiting).filter(Boolean));
      this.#waiting = { now: null, later: null };
    }
    for (const { resolve } of lost) resolve(stopped(why));
    this.#pump();
  }

  #post(kind, text, resolve, config = false) {
    const id = this.#next++;
    this.#sent.set(id, { resolve, kind, config });
    this.#worker.postMessage({ id, kind, text });
  }

  #pump() {
    if (this.#sent.size) return;
    const slot = this.#waiting.now ? "now" : "later";
    const one = this.#waiting[slot];
    if (!one) return;
    this.#waiting[slot] = null;
    const config = one.question.model === "config.json";
    if (config && this.#letGo) {
      one.resolve({ problems: ["The planner stopped on this config.json and has let go of it; drop another, or run: shardwise plan config.json"] });
      return this.#pump();
    }
    this.#post("ask", JSON.stringify(one.question), one.resolve, config);
  }

  // The answer to a question; `later` ones wait for those that are not.
  ask(question, { later = false } = {}) {
    if (this.#why !== null) return Promise.resolve(stopped(this.#why));
    return new Promise((resolve) => {
      const slot = later ? "later" : "now";
      this.#waiting[slot]?.resolve(null);
      this.#waiting[slot] = { question, resolve };
      this.#pump();
    });
  }

  // The configuration that the model `config.json` means from now on.
  config(text) {
    this.#config = text;
    this.#letGo = false;
    if (this.#why === null) this.#post("config", text, () => {});
  }

  // For tests: what a crash does.
  crash() { this.#failed("a test ended it"); }
}

const stopped = (why) => ({ problems: [`The planner stopped: ${why}. Reload the page, or use the command line.`] });
