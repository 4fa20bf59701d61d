"""Where concrete classes meet: settings, process entry points, supervision."""
