"""Interfaces to other programs and services: environments, tools, servers, trackers, test suites, the hub, model files."""
