"""What a release is made of: tools/release.py."""

from __future__ import annotations

import pytest

from tools import release
from tools.release import NotReady, check, notes

CHANGELOG = """# Changelog

## Unreleased

### Added
- More.

## 0.2.0 (2027-01-02)

### Fixed
- Something.

## 0.1.0 (2026-11-17)
"""


def test_the_version_is_read_without_importing() -> None:
    import tokenyard

    assert release.version() == tokenyard.__version__


def test_notes_are_what_the_changelog_says_of_a_version() -> None:
    assert notes("v0.2.0", CHANGELOG) == "### Fixed\n- Something.\n"
    assert notes("v0.1.0", CHANGELOG) == "\n"
    with pytest.raises(NotReady, match=r"no heading '## 0\.3\.0"):
        notes("v0.3.0", CHANGELOG)


def test_a_tag_fits_the_version_and_the_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "version", lambda: "0.2.0")
    check("v0.2.0", CHANGELOG)
    with pytest.raises(NotReady, match=r"the tag is v0\.1\.0, but .* says 0\.2\.0"):
        check("v0.1.0", CHANGELOG)
    monkeypatch.setattr(release, "version", lambda: "0.1.0")
    with pytest.raises(NotReady, match=r"says nothing of 0\.1\.0"):
        check("v0.1.0", CHANGELOG)
    monkeypatch.setattr(release, "version", lambda: "0.3.0.dev0")
    with pytest.raises(NotReady, match="not the version of a release"):
        check("v0.3.0.dev0", CHANGELOG)
    with pytest.raises(SystemExit, match="the tag is"):
        release.main(["check", "v9.9.9"])


def test_the_changelog_says_what_this_version_brings() -> None:
    if "dev" not in release.version():
        check(f"v{release.version()}", release.CHANGELOG.read_text())
    assert "## " in release.CHANGELOG.read_text()
