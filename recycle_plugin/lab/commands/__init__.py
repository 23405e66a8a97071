"""Subcommands of ``recycle`` for studying the plugin."""

from __future__ import annotations

COMMANDS = {word: f"recycle_plugin.lab.commands.{word}" for word in ("simulate", "profile", "campaign")}
"""{subcommand: module}"""
