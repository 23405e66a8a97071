from __future__ import annotations

import socket

import pytest

from recycle_plugin.runtime.system.host import BOOT, host_name


@pytest.mark.parametrize("name", ("localhost", "localhost.localdomain"))
def test_hosts_without_a_name_of_their_own_are_told_apart(name, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    before, kind, boot = host_name().rpartition("-")
    assert (before, kind) == (name, "-") and BOOT.read_text().startswith(boot) and len(boot) == 8


def test_other_hosts_have_their_names(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.localhost-cluster")
    assert host_name() == "node-7.localhost-cluster"
