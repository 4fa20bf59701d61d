"""Torn records, corrupt headers, and a side that dies at every single instruction."""

import pytest

from headrace.ipc import ring as ring_module
from headrace.ipc.ring import RecordTooLarge, Ring, RingCorrupt
from tests.ipc.opcodes import dies_at

WRITE, READ = 16, 32  # words of the header that hold the cursors
DATA = 48 * 8  # where the data begin


def ring_of(capacity=64):
    buffer = bytearray(Ring.size_bytes(capacity))
    return buffer, Ring.create(buffer)


def words(buffer):
    return memoryview(buffer)[:DATA].cast("Q")


def pops(ring, count):
    return [ring.try_pop() for _ in range(count)]


class TestTornRecords:
    @pytest.mark.parametrize("offset", range(8 + 11))
    @pytest.mark.parametrize("flip", [0x01, 0x80])
    def test_a_changed_byte_anywhere_in_a_record_keeps_it_from_being_delivered(self, offset, flip):
        buffer, ring = ring_of()
        ring.try_push(b"hello world")
        buffer[DATA + offset] ^= flip
        assert pops(ring, 50) == [None] * 50
        assert ring.has_records

    def test_a_record_that_appears_late_is_delivered_then(self):
        """The cursor is seen before the bytes, as on a weakly ordered machine."""
        buffer, ring = ring_of()
        ring.try_push(b"hello world")
        late = bytes(buffer[DATA : DATA + 24])
        buffer[DATA : DATA + 24] = bytes(24)
        assert pops(ring, 60) == [None] * 60
        buffer[DATA : DATA + 12] = late[:12]
        assert pops(ring, 30) == [None] * 30
        buffer[DATA : DATA + 24] = late
        assert ring.try_pop() == b"hello world"
        assert ring.try_pop() is None
        assert not ring.has_records

    def test_bytes_that_stay_away_are_an_error_in_the_end_and_every_time_from_then_on(self):
        buffer, ring = ring_of()
        ring.try_push(b"hello world")
        buffer[DATA + 9] ^= 1
        with pytest.raises(RingCorrupt, match="checksum"):
            pops(ring, 101)
        with pytest.raises(RingCorrupt):
            ring.try_pop()

    def test_success_in_between_starts_the_count_anew(self):
        buffer, ring = ring_of()
        for number in range(5):
            ring.try_push(b"%d" % number)
            offset = DATA + 16 * number % 64
            buffer[offset] ^= 1
            pops(ring, 90)
            buffer[offset] ^= 1
            assert ring.try_pop() == b"%d" % number

    def test_the_same_bytes_from_an_earlier_lap_do_not_pass(self):
        """The write cursor runs ahead over a place where an older, once valid record stands."""
        buffer, ring = ring_of(64)
        for _ in range(4):
            ring.try_push(b"12345678")
        assert pops(ring, 4) == [b"12345678"] * 4
        words(buffer)[WRITE] += 16
        assert pops(ring, 50) == [None] * 50

    def test_a_cursor_over_memory_that_was_never_written_does_not_pass(self):
        buffer, ring = ring_of(64)
        words(buffer)[WRITE] = 8  # an empty record of zeros
        assert pops(ring, 50) == [None] * 50

    def test_a_length_beyond_what_is_published_does_not_pass(self):
        buffer, ring = ring_of(64)
        ring.try_push(b"1" * 32)
        words(buffer)[WRITE] -= 8
        assert pops(ring, 50) == [None] * 50

    @pytest.mark.parametrize(("read", "write"), [(0, 72), (16, 8), (2**63, 0)])
    def test_cursors_that_cannot_be_are_an_error_at_once(self, read, write):
        buffer, ring = ring_of(64)
        words(buffer)[READ], words(buffer)[WRITE] = read, write
        with pytest.raises(RingCorrupt, match="cursors"):
            ring.try_pop()

    def test_discarding_mends_a_corrupt_ring(self):
        buffer, ring = ring_of()
        ring.try_push(b"good")
        ring.try_push(b"bad")
        ring.try_push(b"lost")
        buffer[DATA + 16 + 9] ^= 1
        assert ring.discard_all() == 1
        assert ring.try_pop() is None
        ring.try_push(b"new")
        assert ring.try_pop() == b"new"


class TestHeader:
    def test_attaching_to_nothing(self):
        with pytest.raises(RingCorrupt, match="magic"):
            Ring.attach(bytearray(1000))
        with pytest.raises(RingCorrupt, match="holds no ring"):
            Ring.attach(bytearray(100))

    @pytest.mark.parametrize(("word", "value"), [(0, 1), (1, 99), (2, 1 << 40), (2, 60), (3, 0), (3, 64)])
    def test_attaching_to_another_format(self, word, value):
        buffer, _ = ring_of(64)
        words(buffer)[word] = value
        with pytest.raises(RingCorrupt):
            Ring.attach(buffer)

    def test_a_cut_off_buffer(self):
        buffer, _ = ring_of(64)
        with pytest.raises(RingCorrupt, match="cannot be"):
            Ring.attach(buffer[:-8])

    def test_sizes_that_make_no_ring(self):
        with pytest.raises(ValueError, match="too small"):
            Ring.create(bytearray(DATA + 8))
        with pytest.raises(ValueError, match="max_record_bytes"):
            Ring.create(bytearray(Ring.size_bytes(64)), max_record_bytes=57)

    def test_oversize_says_both_sizes_and_leaves_the_ring_alone(self):
        _, ring = ring_of(64)
        with pytest.raises(RecordTooLarge, match="57 bytes; this ring takes 56"):
            ring.try_push(b"x" * 57)
        assert ring.statistics().num_pushed == ring.statistics().num_full == 0

    def test_closing_lets_go_of_the_buffer(self):
        buffer, ring = ring_of(64)
        with pytest.raises(BufferError):
            buffer.extend(b"x")
        ring.close()
        ring.close()
        buffer.extend(b"x")


def filled_ring():
    """A ring in which the next record is split by the end: two records wait, read and write are in the second lap."""
    buffer, ring = ring_of(96)
    for record in (b"a" * 20, b"b" * 20):
        ring.try_push(record)
    pops(ring, 2)
    ring.try_push(b"first")
    ring.try_push(b"second")
    return buffer


class TestDeathAtEveryInstruction:
    def test_of_the_producer(self):
        """What was published before stays; the dying push is there whole or not at all; its successor goes on."""
        outcomes = set()
        opcode_number = 0
        while True:
            buffer = filled_ring()
            producer = Ring.attach(buffer)
            killed = dies_at(ring_module, opcode_number, lambda ring=producer: ring.try_push_all([b"third" * 3, b"4"]))
            successor, consumer = Ring.attach(buffer), Ring.attach(buffer)
            assert successor.try_push(b"fifth")
            received = [record for record in pops(consumer, 8) if record is not None]
            assert received in ([b"first", b"second", b"fifth"], [b"first", b"second", b"third" * 3, b"4", b"fifth"])
            assert not consumer.has_records
            outcomes.add((killed, len(received)))
            opcode_number += 1
            if not killed:
                break
        assert outcomes == {(True, 3), (True, 5), (False, 5)}
        assert opcode_number > 100

    def test_of_the_consumer(self):
        """Its successor gets the same record (it was not taken) or the next one (it was): never both, never a third thing."""
        outcomes = set()
        opcode_number = 0
        while True:
            buffer = filled_ring()
            consumer = Ring.attach(buffer)
            killed = dies_at(ring_module, opcode_number, consumer.try_pop)
            successor = Ring.attach(buffer)
            received = pops(successor, 3)
            assert received in ([b"first", b"second", None], [b"second", None, None])
            outcomes.add((killed, received[0]))
            opcode_number += 1
            if not killed:
                break
        assert outcomes == {(True, b"first"), (True, b"second"), (False, b"second")}
        assert opcode_number > 50
