"""Subcommands of ``recycle`` that study the plugin."""
