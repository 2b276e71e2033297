"""The accounting process of a controller: attributes the time of its workers and writes the files of `TimeFiles`.

It reads frames from the socket that is its standard input, answers each of them, and ends with the last one. When the
controller dies, it is killed; the files then end with the controller's last tick.
"""

import signal
import socket
import sys

import msgspec

from flowrt.controller.storage.accounting import HEADER, Answer, Frame, encode, receive
from flowrt.controller.storage.time_files import TimeFiles, TimeFilesStart
from flowrt.errors import EXIT_OK
from flowrt.runtime.standard_streams import log_to_stderr
from flowrt.runtime.termination import termination_signals

_decode_start = msgspec.msgpack.Decoder(TimeFilesStart).decode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode


class FrameReader:
    """Applies frames to a `TimeFiles`."""

    def __init__(self, start: TimeFilesStart) -> None:
        self._times = times = TimeFiles(start)
        account = times.account
        self._of_kind = (
            account.joined,
            account.gone,
            account.training_started,
            account.close_step,
            account.note_report,
            times.add_record,
            times.add_resources,
        )

    def apply(self, frame: Frame) -> Answer:
        """Apply a frame; returns the answer to it."""
        times, of_kind = self._times, self._of_kind
        before, resources_before = times.latest, times.resources.latest
        for kind, *values in frame.records:
            of_kind[kind](*values)
        times.add_waits(frame.waits)
        if frame.is_last and frame.tick_s is not None:
            times.close(frame.tick_s, frame.open_waits)
        elif frame.tick_s is not None:
            times.write(frame.tick_s, frame.open_waits)
        return Answer(
            None if times.latest is before else times.latest,
            times.shares(),
            times.malformed,
            None if times.resources.latest is resources_before else times.resources.latest,
        )


def main() -> int:
    log_to_stderr()
    for number in (*termination_signals(), signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the controller decides when the run ends
    with socket.socket(fileno=0) as stream, stream.makefile("rb") as frames:
        start = receive(frames)
        if start is None:
            return EXIT_OK
        reader = FrameReader(_decode_start(start))
        stream.sendall(_framed(Answer(None, {}, 0)))
        while (data := receive(frames)) is not None:
            stream.sendall(_framed(reader.apply(_decode_frame(data))))
    return EXIT_OK


def _framed(answer: Answer) -> bytes:
    data = encode(answer)
    return HEADER.pack(len(data)) + data


if __name__ == "__main__":
    sys.exit(main())
