"""The tests' own reader of checkpoints reads what shardam writes, and notices what is not as it was written."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from shardam_testing.faults.checkpoint_files import SEGMENT_MAGIC, read_frames
from shardam_testing.faults.cut_messages import told_reply, told_request

from shardam_proto.v1 import checkpoint_pb2, common_pb2, cut_pb2, embedding_pb2, row_pb2
from shardam_server.shard.journal.frames import encode_frame, encode_preamble

HEADER = common_pb2.RequestHeader(protocol_version=1, cluster_id="c", incarnation=7, budget_s=3)


def segment_of(*frames: tuple[bytes, npt.NDArray[np.generic]]) -> bytes:
    """Returns a file as shardam writes it."""
    buffers = [encode_preamble(SEGMENT_MAGIC)]
    for place, (message, array) in enumerate(frames):
        buffers += [bytes(part) for part in encode_frame(place, message, [array])]
    return b"".join(buffers)


def test_frames_are_read_as_they_were_written() -> None:
    frames: list[tuple[bytes, npt.NDArray[np.generic]]] = [
        (b"first", np.arange(3)),
        (b"second", np.zeros(0)),
        (b"", np.arange(5_000, dtype=np.float32)),
    ]
    found = list(read_frames(segment_of(*frames), SEGMENT_MAGIC))
    assert found == [(message, array.tobytes()) for message, array in frames]


def test_every_flipped_byte_of_a_file_is_noticed() -> None:
    data = segment_of((b"message", np.arange(4)))
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(AssertionError):
            list(read_frames(changed, SEGMENT_MAGIC))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (cut_pb2.HoldRequest(header=HEADER, hold_id=5, hold_s=2), "hold"),
        (cut_pb2.AdvanceRequest(header=HEADER, hold_id=5, targets=[cut_pb2.HeldClient(client_id=b"c" * 16)]), "advance"),
        (cut_pb2.CutRequest(header=HEADER, hold_id=5, task_id=6, folder="test/name"), "cut"),
        (cut_pb2.CheckFilesRequest(header=HEADER, task_id=6, folder="test/name", num_shards=3), "check"),
        (cut_pb2.AdoptPlanRequest(header=HEADER, plan='{"plan_id": "1"}'), "adopt"),
        (cut_pb2.ReleaseRequest(header=HEADER, hold_id=5), None),
        (cut_pb2.GetTaskRequest(header=HEADER, task_id=6), None),
        (row_pb2.ReadRowsRequest(header=HEADER, table_id=9, row_ids=b"12345678"), None),
        (embedding_pb2.PullRequest(header=HEADER, row_ids=b"12345678"), None),
    ],
)
def test_home_s_requests_are_told_apart(message: cut_pb2.HoldRequest, kind: str | None) -> None:
    assert told_request(message.SerializeToString()) == kind


def test_the_answer_of_a_shard_that_has_written_is_told() -> None:
    files = [checkpoint_pb2.CheckpointFile(name="shard-0-of-1-000.rows")]
    written = checkpoint_pb2.CheckpointShard(folder="/root", files=files)
    assert told_reply(cut_pb2.GetTaskResponse(written=written).SerializeToString()) == "written"
    assert told_reply(cut_pb2.GetTaskResponse(done_bytes=5).SerializeToString()) is None
