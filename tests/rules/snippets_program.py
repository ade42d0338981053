"""Run every Python block of the documents, each as if it were pasted into a new interpreter.

    python snippets_program.py README.md docs/simulate.md

Every block has a process of its own in which nothing of thinwire is loaded, an empty folder and an empty
namespace. A line is written for each: where it stands, and what went wrong ("" if nothing).
"""

import ast
import contextlib
import doctest
import io
import json
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numba  # noqa: F401
import torch

NOT_RUN = "# Not run by the tests: "
SEVERAL = 2  #: at a time


def blocks(path):
    """The line and the text of every Python block."""
    text = path.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        yield text.count("\n", 0, block.start()) + 2, block.group(1)


def run(text, where):
    """What went wrong in a block."""
    said = io.StringIO()
    if ">>>" not in text and all(
        isinstance(each, ast.Import | ast.ImportFrom) for each in ast.parse(text).body
    ):
        return "it only imports: comments are no example"
    try:
        with contextlib.redirect_stdout(said):
            if ">>>" not in text:
                exec(compile(text, where, "exec"), {"__name__": "__main__"})
                return ""
            examples = doctest.DocTestParser().get_doctest(text, {}, where, where, 0)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(examples)
            return said.getvalue() if runner.failures else ""
    except BaseException:  # noqa: BLE001
        return traceback.format_exc()


def child(text, where, out):
    """In a new process: everything that a block may touch is thrown away."""
    pid = os.fork()
    if pid:
        return pid
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["THINWIRE_DATA"] = folder
        began = time.perf_counter()
        wrong = run(text, where)
        seconds = round(time.perf_counter() - began, 1)
        os.chdir("/")
    tell(out, block=where, wrong=wrong[-2000:], seconds=seconds)
    os._exit(0)


def tell(out, **what):
    os.write(out, (json.dumps(what) + "\n").encode())


def main(paths):
    running = []
    for path in map(Path, paths):
        for line, text in blocks(path):
            where = f"{path.name}:{line}"
            if text.startswith(NOT_RUN):
                tell(sys.stdout.fileno(), block=where, why=text.splitlines()[0][len(NOT_RUN) :])
                continue
            running.append(child(text, where, sys.stdout.fileno()))
            if len(running) == SEVERAL:
                os.waitpid(running.pop(0), 0)
    for pid in running:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    assert not any(name.startswith("thinwire") for name in sys.modules)
    main(sys.argv[1:])
