// A worker with the planner. Of questions that wait, only the newest is asked; the others resolve to null.
export class Engine {
  #worker; #sent = new Map(); #next = 1; #waiting = { now: null, later: null }; #config = null; #restarts = 0;
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
      const resolve = this.#sent.get(data.id);
      this.#sent.delete(data.id);
      resolve?.(data.reply);
      this.#pump();
    };
    this.#worker.onerror = (event) => { event.preventDefault?.(); this.#failed(event.message || "it could not be loaded"); };
    if (this.#config !== null) this.#post("config", this.#config, () => {});
  }

  #failed(why) {
    this.#worker.terminate();
    const lost = [...this.#sent.values()];
    this.#sent.clear();
    const problem = { problems: [`The planner stopped: ${why}. Reload the page, or use the command line.`] };
    if (this.#restarts++ < 1) this.#start();
    else {
      this.#rejectReady(new Error(why));
      lost.push(...Object.values(this.#waiting).filter(Boolean).map((one) => one.resolve));
      this.#waiting = { now: null, later: null };
    }
    for (const resolve of lost) resolve(problem);
    this.#pump();
  }

  #post(kind, text, resolve) {
    const id = this.#next++;
    this.#sent.set(id, resolve);
    this.#worker.postMessage({ id, kind, text });
  }

  #pump() {
    if (this.#sent.size) return;
    const slot = this.#waiting.now ? "now" : "later";
    const one = this.#waiting[slot];
    if (!one) return;
    this.#waiting[slot] = null;
    this.#post("ask", JSON.stringify(one.question), one.resolve);
  }

  // The answer to a question; `later` ones wait for those that are not.
  ask(question, { later = false } = {}) {
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
    this.#post("config", text, () => {});
  }

  // For tests: what a crash does.
  crash() { this.#failed("a test ended it"); }
}
