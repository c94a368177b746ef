"""Programs and services of other people: environments, tools, servers, trackers, test suites, the hub, model files."""
