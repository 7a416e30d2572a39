"""The command line: one file a command, one place for exit codes."""
