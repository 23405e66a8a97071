"""What plans are compared with: an oracle, and many cases."""
