"""Size guide: file <= 400 lines, function <= 60, class <= 250, travelling type <= 12 fields.

python tools/size_guide.py          # prints what is over and exits with 1
"""

import ast
import pathlib
import sys

MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_FIELDS = 400, 60, 250, 12
# Raised by decision record only: {"path[:name]": (limit, "docs/adr/NNNN-...")}
RAISED: dict[str, tuple[int, str]] = {}


def length(node: ast.stmt) -> int:
    """Lines from the def or class line to the last one, decorators left out."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def findings(path: pathlib.Path, root: pathlib.Path) -> list[str]:
    """What in one file is over the guide, a line each."""
    name = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    over = []

    def check(what: str, key: str, value: int, limit: int) -> None:
        limit = RAISED.get(key, (limit, ""))[0]
        if value > limit:
            over.append(f"{key}: {what} {value}, guide {limit}")

    check("lines", name, text.count("\n"), MAX_FILE)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            check("lines of function", f"{name}:{node.name}", length(node), MAX_FUNCTION)
        elif isinstance(node, ast.ClassDef):
            check("lines of class", f"{name}:{node.name}", length(node), MAX_CLASS)
            if "/protocol/" in name:
                fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
                check("fields", f"{name}:{node.name}", fields, MAX_FIELDS)
    return over


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    paths = sorted((root / "src").rglob("*.py"))
    over = [line for path in paths for line in findings(path, root)]
    print("\n".join(over) or f"size guide: {len(paths)} files, nothing over")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
