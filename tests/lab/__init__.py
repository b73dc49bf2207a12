"""The lab: a cluster of nodes made of namespaces on one Linux machine (`python -m tests.lab`)."""
