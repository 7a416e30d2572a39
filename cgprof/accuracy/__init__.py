"""Is a replay right? Parity with eager and with a reference."""
