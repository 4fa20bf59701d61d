"""For all tests: `import headrace` comes before any test's `import openvino`, which would report itself to its maker."""

import headrace  # noqa: F401
