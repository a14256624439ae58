"""The stage engine on this machine's cores."""
