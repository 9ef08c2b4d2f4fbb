// node precompile.mjs ENGINE ZIP: compiles the Python files of a zip by Pyodide's own Python, so that no reader's browser has to.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const [engine, archive] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${engine}/pyodide.mjs`));
const python = await loadPyodide({ indexURL: engine });
python.unpackArchive(new Uint8Array(fs.readFileSync(archive)), "zip", { extractDir: "/tmp/in" });
python.runPython(`
import compileall, pathlib, py_compile, zipfile
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
if not compileall.compile_dir("/tmp/in", quiet=1, legacy=True, stripdir="/tmp/in", invalidation_mode=mode):
    raise SystemExit("a file cannot be compiled")
with zipfile.ZipFile("/tmp/out.zip", "w") as packed:
    for path in sorted(pathlib.Path("/tmp/in").rglob("*")):
        if path.is_file() and path.suffix != ".py":
            entry = zipfile.ZipInfo(str(path.relative_to("/tmp/in")), (1980, 1, 1, 0, 0, 0))
            packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
`);
fs.writeFileSync(archive, python.FS.readFile("/tmp/out.zip"));
