"""The pages of documentation, and the commands that they show."""

import re
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGES = [REPO / 'README.md', *sorted((REPO / 'docs').glob('*.md')), *sorted(REPO.glob('configs/*/README.md'))]


def named(page: Path) -> str:
    return str(page.relative_to(REPO))


def commands() -> dict[str, str]:
    """All commands, those set off as code and those within a line, each with the first page that shows it."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text()
        for line in re.findall(r'^ {4}(.+)$', text, re.M) + re.findall(r'`([^`\n]+)`', text):
            line = re.sub(r'\s+#.*$', '', line)
            if re.match(r'([A-Z_]+=\S+ )*(python|make|tools/\S+\.(py|sh)|requirements/\S+\.sh) ', line):
                found.setdefault(line, named(page))
    return found
