"""The words that workers and coordinator share, and the rules that follow from them for both."""
