"""The vocabulary and the rules that every other layer shares; standard library only."""
