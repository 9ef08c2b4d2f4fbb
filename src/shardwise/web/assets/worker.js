// Python under Pyodide: loads Shardwise's planning layers and answers one message after the other.
import { loadPyodide } from "./engine/pyodide.mjs";

const here = new URL("engine/", import.meta.url).href;

async function start() {
  const archive = fetch(`${here}shardwise.zip`).then((reply) => {
    if (!reply.ok) throw new Error(`shardwise.zip: HTTP ${reply.status}`);
    return reply.arrayBuffer();
  });
  const python = await loadPyodide({ indexURL: here });
  const folder = python.runPython("import site; site.getsitepackages()[0]");
  python.unpackArchive(new Uint8Array(await archive), "zip", { extractDir: folder });
  const reply = python.runPython("from shardwise.web.answer import reply; reply");
  postMessage({ id: 0, reply: JSON.parse(reply("lists", "")) });
  return reply;
}

const started = start();
started.catch((error) => postMessage({ id: 0, failed: String(error) }));
onmessage = async ({ data }) => {
  const reply = await started;
  postMessage({ id: data.id, reply: JSON.parse(reply(data.kind, data.text)) });
};
