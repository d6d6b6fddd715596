"""The `tokenyard` command: what a person types. `app` lists its commands, one module each.

Commands only read options and show results. The work is done by rooms below, which know neither
typer nor rich (the extra `cli` brings both).
"""
