"""The subcommands together: what each imports, and that it is found by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_plugin import cli
from tests.support.run_folder import LOG

CHECKOUT = Path(__file__).parents[2]
HEAVY = ("torch", "numba", "numpy", "deepspeed", "matplotlib", "pydantic")
COMMANDS = {**cli.COMMANDS, **cli.of_the_lab()}


@pytest.mark.parametrize("word", COMMANDS)
def test_a_command_is_in_the_module_that_is_imported_for_it(word, capsys):
    for arguments in ([word, "--help"], ["--help"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        usage, _, rest = capsys.readouterr().out.partition("\n")
        assert word in (usage if arguments[0] == word else rest)


def test_a_look_at_a_run_imports_neither_torch_nor_numba(tmp_path):
    (tmp_path / "events.jsonl").write_text(LOG.read_text())
    script = f"""
import json, sys
from recycle_plugin.cli import main
found = {{}}
for words in {LIGHT!r}:
    main([*words, {str(tmp_path)!r}] if words[0] != "docs" else words)
    found[words[0]] = sorted({{*{HEAVY!r}}} & {{*sys.modules}})
print(json.dumps(found), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=CHECKOUT, timeout=100)
    assert done.returncode == 0 and json.loads(done.stderr.splitlines()[-1]) == {words[0]: [] for words in LIGHT}


LIGHT = (["docs", "tutorial"], ["status"], ["leave", "1.1", "--run"])
