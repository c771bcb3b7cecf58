"""The files that a recorder makes in its run's folder: documents, tables, figures, the log, and what the workers print.

The run's store should have each as well. What the disk refuses is written again by the next call.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import RecordError
from lockstep.files import encoded, write_bytes
from lockstep.paths import OutsideError, beneath
from lockstep.record import problems
from lockstep.record.ledger import final_tables
from lockstep.record.ledger.journal import Journal
from lockstep.record.mirror.run_texts import LOG, Texts
from lockstep.record.mirror.seal import Known, seal

Content = str | bytes


def as_written(content: Content) -> bytes:
    """The bytes of a document in its file."""
    return encoded(content) if isinstance(content, str) else content


class RunFiles:
    """The files of one run. Only `log` may be called by any thread; the others raise OSError where the disk refuses."""

    def __init__(self, folder: Path, journal: Journal, *, scaled: bool) -> None:
        self.folder, self._journal = folder, journal
        self._texts = Texts(folder)
        self.figures = final_tables.Figures(journal, folder, scaled=scaled, log=self.log)
        self._hashed: Known = {}
        self.written: dict[str, Content] = {}
        """The documents that the folder has."""
        self.names: dict[str, object] = {}
        """The path of each file below the folder, and a value that changes with its content."""

    def write(self, documents: Mapping[str, Content]) -> list[RecordError]:
        """Write the documents that the folder lacks, each whole or not at all. Returns which cannot be written there at all."""
        impossible = []
        for name, content in documents.items():
            if self.written.get(name) == content:
                continue
            try:
                path = beneath(self.folder, name)
            except OutsideError as error:
                impossible.append(problems.LEADS_OUT(run=self.folder.name, got=error))
            else:
                write_bytes(path, as_written(content))
                self.names[name] = content
            self.written[name] = content
        return impossible

    def write_tables(self) -> None:
        """Write the final tables, and draw the figures."""
        for path in final_tables.write(self._journal, self.folder):
            self.keep(path)
        self.figures.draw(written=True)
        for path in self.figures.drawn:
            self.keep(path)

    def keep(self, path: Path) -> None:
        """Let the store have a file that is not written here, as it is now."""
        try:
            name = path.relative_to(self.folder).as_posix()
            beneath(self.folder, name)
        except ValueError as error:
            self.log(f"not recorded: {error}")
            return
        status = path.stat() if path.exists() else None  # a missing one is reported when it is sent
        self.names[name] = status and (status.st_ino, status.st_size, status.st_mtime_ns)

    def keep_output(self) -> None:
        """Let the store have what the workers have printed, and the log."""
        for path in [*self._texts.end(), self.folder / LOG]:
            self.keep(path)

    def seal(self) -> None:
        """Seal what the folder of a finished run has now."""
        self.keep(seal(self.folder, self._hashed))

    def log(self, text: str) -> None:
        """Add a line to log.txt, with its time. Any thread may call it."""
        self._texts.log(text)

    def output(self, name: str, text: str) -> None:
        """Add what a worker has printed."""
        self._texts.output(name, text)
