"""Measure peak memory and time of loading a model and preparing its optimised forward.

    python tests/bench/memory.py FOLDER [--dtypes float32 bfloat16 int8]

Each dtype is measured in a separate process. The memory that the process used after preparing a tiny model is
subtracted. `load_seconds` includes the preparation, and `read_seconds` is the time to read the model's files. The last
line of the output is one JSON object.
"""

import json
import subprocess
import sys
from tempfile import TemporaryDirectory

from common import finish, parser_of, random_llama

SCRIPT = """
import json, resource, sys, time
from pathlib import Path
import psutil, torch
from draftsmith.checkpoints.verify.model_files import load_config, meta_model
from draftsmith.decode.models.loading import load_model, wrap_model

def prepare(folder):
    start = time.perf_counter()
    wrapped = wrap_model(load_model(folder, dtype=dtype).requires_grad_(False), share=True)
    return wrapped, {"load_seconds": time.perf_counter() - start}

tiny, folder, dtype = sys.argv[1:]
count = sum(weight.numel() for weight in meta_model(load_config(folder)).parameters())
prepare(tiny)
start = time.perf_counter()
for file in (path.open("rb") for path in Path(folder).glob("*.safetensors")):
    sum(map(len, iter(lambda: file.read(1 << 24), b"")))
measured = {"read_seconds": time.perf_counter() - start}
before = psutil.Process().memory_info().rss
wrapped, seconds = prepare(folder)
after, peak = psutil.Process().memory_info().rss, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weights = count * getattr(torch, dtype).itemsize
sizes = {"weights_bytes": weights, "memory_bytes": after - before, "peak_memory_bytes": peak - before}
print(json.dumps(measured | seconds | sizes))
"""


if __name__ == "__main__":
    parser = parser_of(__doc__, "ignored; accepted as in the other benchmarks")
    parser.add_argument("folder", help="model folder")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    options, results = parser.parse_args(), {}
    with TemporaryDirectory() as place:
        random_llama((64, 64, 1, 4, 64)).save_pretrained(place)
        for dtype in options.dtypes:
            command = [sys.executable, "-c", SCRIPT, place, options.folder, dtype]
            results[dtype] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(dtype, *(f"{name} {number:,.4g}" for name, number in results[dtype].items()))
    finish(results)
