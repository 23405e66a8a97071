"""What a process gets from its operating system: forks, accepted connections, clocks and output."""
