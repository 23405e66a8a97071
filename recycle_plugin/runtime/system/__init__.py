"""What a process gets of its operating system: forks, and connections that are accepted."""
