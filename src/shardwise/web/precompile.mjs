// node precompile.mjs ENGINE ARCHIVE STDLIB UNUSED...: compiles Python by Pyodide's own Python, so that no reader's browser has to:
// all of the archive, and of the standard library what an answer imports. UNUSED are entries of the library that are left out.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const [engine, archive, stdlib, ...unused] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${engine}/pyodide.mjs`));
const python = await loadPyodide({ indexURL: engine });
const unpack = (file, folder) => python.unpackArchive(new Uint8Array(fs.readFileSync(file)), "zip", { extractDir: folder });

unpack(archive, python.runPython("import site; site.getsitepackages()[0]"));
unpack(archive, "/tmp/archive");
unpack(stdlib, "/tmp/stdlib");
python.globals.set("unused", python.toPy(unused));
python.runPython(`
import json, pathlib, py_compile, shutil, sys, zipfile
from shardwise.web.answer import reply

question = {"model": "gpt2", "cluster": "8xA100-80GB", "seq_len": "1k", "global_batch": "8"}
if json.loads(reply("ask", json.dumps(question)))["problems"]:
    raise SystemExit("the engine does not answer")

def pack(folder, imported=None):
    for path in sorted(folder.rglob("*.py")):
        if imported is None or path.relative_to(folder) in imported:
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            name = str(path.relative_to(folder))
            py_compile.compile(path, path.with_suffix(".pyc"), name, doraise=True, invalidation_mode=mode)
            path.unlink()
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w") as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = zipfile.ZipInfo(str(path.relative_to(folder)), (1980, 1, 1, 0, 0, 0))
                packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)

files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
imported = {pathlib.Path(file.partition(".zip/")[2]) for file in files if ".zip/" in file}
stdlib = pathlib.Path("/tmp/stdlib")
for name in unused:
    shutil.rmtree(stdlib / name) if (stdlib / name).is_dir() else (stdlib / name).unlink()
pack(pathlib.Path("/tmp/archive"))
pack(stdlib, imported)
`);
fs.writeFileSync(archive, python.FS.readFile("/tmp/archive.zip"));
fs.writeFileSync(stdlib, python.FS.readFile("/tmp/stdlib.zip"));
