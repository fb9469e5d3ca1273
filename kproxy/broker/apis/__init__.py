"""One file for each API, opening with its versions and behaviours."""
