"""Subcommands of ``recycle`` for trying and studying the plugin."""

from __future__ import annotations

COMMANDS = {word: f"recycle_plugin.lab.commands.{word}" for word in ("demo", "simulate", "campaign")}
"""{subcommand: module}"""
