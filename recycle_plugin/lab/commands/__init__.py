"""Subcommands of ``recycle`` that study the plugin."""

from __future__ import annotations

COMMANDS = {word: f"recycle_plugin.lab.commands.{word}" for word in ("simulate", "profile", "campaign")}
"""The module of each."""
