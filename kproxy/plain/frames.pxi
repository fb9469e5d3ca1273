# Cut received bytes into frames: the twin of kproxy_codec.framing, whose text has the states and invariants.
#
# A frame is a span of its chunk's memoryview, [start, end), as long as only compiled code has it; Python code gets a
# memoryview of its own.

cdef extern from *:
    """
    /* As in kproxy_codec.framing. */
    #define CHUNK_BYTES ((1 << 20) + (64 << 10))
    #define LEAST_FREE_BYTES (64 << 10)
    #define GROWTH 4
    #define KEPT_CHUNKS 64
    #define LENGTH_BYTES 4
    #define BROKEN (-1)
    static inline Py_ssize_t kp_exports(PyObject *chunk) {
        return ((PyByteArrayObject *)chunk)->ob_exports;
    }
    """
    Py_ssize_t kp_exports(object chunk)
    const Py_ssize_t CHUNK_BYTES, LEAST_FREE_BYTES, GROWTH, KEPT_CHUNKS, LENGTH_BYTES, BROKEN


cdef inline uint8_t *data_of(view) except NULL:
    if not PyMemoryView_Check(view):
        raise TypeError("expected a memoryview")
    cdef Py_buffer *buffer = PyMemoryView_GET_BUFFER(view)
    if buffer.ndim != 1 or buffer.strides[0] != 1:
        raise TypeError("expected a contiguous memoryview of bytes")
    return <uint8_t *>buffer.buf


cdef inline object window(uint8_t *start, Py_ssize_t size):
    """A buffer to fill at once: nothing keeps its memory from being reused."""
    if size < 0:
        raise ValueError(f"invalid buffer size {size}; expected 0 or more")
    return PyMemoryView_FromMemory(<char *>start, size, PyBUF_WRITE)


cdef class ReceiveArena:
    """See kproxy_codec.framing.ReceiveArena."""

    cdef list used
    cdef set unfinished
    cdef readonly bytearray chunk
    cdef readonly object view
    cdef readonly Py_ssize_t position
    cdef uint8_t *data

    def __init__(self):
        self.used, self.unfinished = [], set()
        self.begin(bytearray(CHUNK_BYTES))

    cdef begin(self, bytearray chunk):
        self.chunk = chunk
        self.view = memoryview(chunk)
        self.data = data_of(self.view)
        self.position = 0

    def renew(self, keeps=None):
        left, self.unfinished = self.unfinished, set()
        left.discard(keeps)
        for reader in left:
            reader.take_out(self.view)
        self.view = memoryview(b"")
        self.used.append(self.chunk)
        self.begin(self.take())

    def leave(self, reader):
        self.unfinished.add(reader)

    def lend(self):
        chunk = self.take()
        self.used.append(chunk)
        return chunk

    cdef bytearray take(self):
        cdef list used = self.used
        cdef Py_ssize_t at
        for at in range(len(used) - 1, -1, -1):
            if kp_exports(used[at]) == 0:
                return used.pop(at)
        if len(used) > KEPT_CHUNKS:
            del used[0]
        return bytearray(CHUNK_BYTES)


cdef class FrameReader:
    """See kproxy_codec.framing.FrameReader."""

    cdef readonly ReceiveArena _arena
    cdef Py_ssize_t max_frame_bytes, start, end, expected
    cdef public Py_ssize_t most_shared
    # The chunk that holds the unfinished frame, and whether it is this reader's alone.
    cdef object view
    cdef uint8_t *data
    cdef bint own
    cdef readonly Py_ssize_t announced
    # The whole frames of the last `cut`.
    cdef uint8_t *cut_data
    cdef Py_ssize_t cut_start, cut_end

    def __init__(self, Py_ssize_t max_frame_bytes, arena=None, *, Py_ssize_t most_shared=CHUNK_BYTES):
        self._arena = arena if arena is not None else ReceiveArena()
        self.max_frame_bytes = max_frame_bytes
        self.most_shared = most_shared

    @property
    def pending_bytes(self):
        return self.end - self.start

    @property
    def held_bytes(self):
        return self.held()

    cdef inline Py_ssize_t held(self):
        if self.own and self.view is not None:
            return len(self.view)
        return self.end - self.start

    @property
    def has_own(self):
        return self.own

    def admit(self, Py_ssize_t max_frame_bytes):
        if self.max_frame_bytes != BROKEN:
            self.max_frame_bytes = max_frame_bytes

    def get_buffer(self, size_hint=-1, *, bint lean=False):
        return self.space(lean)

    cdef object space(self, bint lean):
        """The buffer for the next bytes."""
        cdef ReceiveArena arena = self._arena
        cdef Py_ssize_t announced = LENGTH_BYTES, size, expected
        if self.view is None:
            expected = 0 if lean else self.expected
            if CHUNK_BYTES - arena.position < max(LEAST_FREE_BYTES, expected):
                arena.renew()
            size = min(self.most_shared, CHUNK_BYTES - arena.position)
            if size > expected > 0:
                size -= size % expected
            return window(arena.data + arena.position, size)
        if self.end - self.start >= LENGTH_BYTES:
            announced += kp_int32(self.data + self.start)
        size = len(self.view)
        if self.own:
            if self.end < size:
                return window(self.data + self.end, min(self.start + announced, size) - self.end)
        elif (
            self.end < size
            and announced <= size - self.start
            and self.view is arena.view
            and self.end == arena.position
        ):
            return self.shared_from(self.end)
        return self.move(announced, lean)

    cdef inline object shared_from(self, Py_ssize_t position):
        return window(self._arena.data + position, min(self.most_shared, CHUNK_BYTES - position))

    cdef object move(self, Py_ssize_t announced, bint lean):
        """Move the unfinished frame to a place where more of it fits, and return the space behind it."""
        cdef ReceiveArena arena = self._arena
        cdef Py_ssize_t held = self.end - self.start, size, start
        # Its chunk, while its bytes are copied.
        old, old_data = self.view, self.data
        if announced > CHUNK_BYTES // 4:
            size = min(announced, held + LEAST_FREE_BYTES if lean else max(CHUNK_BYTES, GROWTH * held))
            view = memoryview(bytearray(size) if lean or size > CHUNK_BYTES else arena.lend())
            start, own = 0, True
        else:
            if CHUNK_BYTES - arena.position < max(LEAST_FREE_BYTES, announced):
                arena.renew(self)
            view, start, own = arena.view, arena.position, False
            arena.position += held
        self.data = data_of(view)
        memmove(self.data + start, old_data + self.start, held)
        self.view, self.own = view, own
        self.start, self.end = start, start + held
        if self.own:
            return window(self.data + self.end, min(announced, len(view)) - self.end)
        return self.shared_from(self.end)

    def move_to(self, buffer):
        if self.view is None:
            raise ValueError("no frame is arriving")
        cdef Py_ssize_t held = self.end - self.start
        view = memoryview(buffer)
        if len(view) < held:
            raise ValueError(f"{held} bytes do not fit into {len(view)}")
        memmove(data_of(view), self.data + self.start, held)
        self.view, self.data = view, data_of(view)
        self.start, self.end, self.own = 0, held, True

    def drop(self):
        self.max_frame_bytes = BROKEN
        self.let_go()

    def buffer_updated(self, Py_ssize_t nbytes):
        """The frames that `nbytes` more bytes complete, in order. Raises FrameTooLarge, InvalidField."""
        view = self.cut(nbytes)
        cdef uint8_t *data = self.cut_data
        cdef Py_ssize_t at = self.cut_start, end = self.cut_end, size
        cdef list frames = []
        while at < end:
            size = LENGTH_BYTES + kp_int32(data + at)
            frames.append(view[at:at + size])
            at += size
        return frames

    cdef object cut(self, Py_ssize_t nbytes):
        """The chunk whose [cut_start, cut_end) are the whole frames that `nbytes` more bytes complete."""
        cdef ReceiveArena arena = self._arena
        cdef Py_ssize_t start, end, frame_end, length, last = 0
        cdef bint reads_long = self.most_shared >= CHUNK_BYTES
        cdef uint8_t *data
        view = self.view
        if view is None:
            view, data, start = arena.view, arena.data, arena.position
            end = start
        else:
            data, start, end = self.data, self.start, self.end
        if not 0 <= nbytes <= PyMemoryView_GET_BUFFER(view).len - end:
            raise ValueError(f"no room for {nbytes} bytes at {end}")
        end += nbytes
        if self.view is None or not self.own:
            arena.position = end
        self.cut_data, self.cut_start = data, start
        frame_end = start
        while end - start >= LENGTH_BYTES:
            length = kp_int32(data + start)
            if not 0 <= length <= self.max_frame_bytes:
                raise self.broken_by(length)
            frame_end = start + LENGTH_BYTES + length
            if frame_end > end:
                break
            last = frame_end - start
            start = frame_end
        self.cut_end = start
        if last:
            self.expected = last if reads_long and LEAST_FREE_BYTES < last <= CHUNK_BYTES else 0
        if start == end:
            self.let_go()
            return view
        self.view, self.data, self.start, self.end = view, data, start, end
        self.announced = frame_end - start
        if not self.own:
            if (
                reads_long
                and nbytes >= LEAST_FREE_BYTES
                and CHUNK_BYTES // 4 < self.announced <= CHUNK_BYTES - start
            ):
                self.own = True
                arena.renew(self)
            else:
                arena.unfinished.add(self)
        return view

    def take_out(self, view):
        if self.view is view:
            held = bytearray(view[self.start:self.end])
            self.view = memoryview(held)
            self.data = data_of(self.view)
            self.start, self.end = 0, len(held)

    cdef inline let_go(self):
        self.view, self.start, self.end, self.own, self.announced = None, 0, 0, False, 0

    cdef broken_by(self, Py_ssize_t length):
        """The error for `length`. From here on every length is illegal: further bytes do not begin at a frame."""
        cdef Py_ssize_t admitted = self.max_frame_bytes
        self.max_frame_bytes = BROKEN
        self.let_go()
        return illegal_length(length, admitted)


cdef struct kp_sent:
    int32_t correlation_id
    uint32_t size
    double at


cdef class AwaitedAnswers:
    """See kproxy_codec.correlation.AwaitedAnswers: a ring of what was sent, and of waiters."""

    cdef readonly object frames
    cdef Py_ssize_t most, first, count, room
    cdef public int32_t _last_id
    cdef kp_sent *sent_ones
    cdef list waiters
    cdef readonly int64_t awaited_bytes
    cdef readonly double sent_at

    def __init__(self, frames, Py_ssize_t most=0x7FFFFFFF):
        self.frames, self.most = frames, most
        self.make_room(2)

    def __dealloc__(self):
        PyMem_Free(self.sent_ones)

    cdef make_room(self, Py_ssize_t room):
        """Move the ring into one of `room` places, a power of two."""
        cdef kp_sent *sent_ones = <kp_sent *>PyMem_Malloc(room * sizeof(kp_sent))
        cdef Py_ssize_t at, place
        if sent_ones == NULL:
            raise MemoryError
        waiters = [None] * room
        for at in range(self.count):
            place = (self.first + at) & (self.room - 1)
            sent_ones[at], waiters[at] = self.sent_ones[place], self.waiters[place]
        PyMem_Free(self.sent_ones)
        self.sent_ones, self.waiters, self.room, self.first = sent_ones, waiters, room, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter([self.waiters[(self.first + at) & (self.room - 1)] for at in range(self.count)])

    @property
    def oldest(self):
        return (self.sent_ones[self.first].correlation_id, self.waiters[self.first]) if self.count else None

    def next_id(self):
        return self.following_id()

    cdef inline int32_t following_id(self):
        self._last_id = <int32_t>((<uint32_t>self._last_id + 1) & 0x7FFFFFFF)
        return self._last_id

    def sent(self, int32_t correlation_id, waiter, uint32_t size=0, double at=0.0):
        self.add(correlation_id, waiter, size, at)

    cdef int add(self, int32_t correlation_id, waiter, uint32_t size, double at) except -1:
        if self.count >= self.most:
            raise CodecError(f"{self.most} earlier requests have no answer yet")
        if self.count == self.room:
            self.make_room(2 * self.room)
        cdef Py_ssize_t place = (self.first + self.count) & (self.room - 1)
        self.sent_ones[place].correlation_id, self.waiters[place] = correlation_id, waiter
        self.sent_ones[place].size, self.sent_ones[place].at = size, at
        self.awaited_bytes += size
        self.count += 1
        return 0

    def match(self, answer):
        view = memoryview(answer)
        return self.matching(data_of(view), len(view))

    cdef object matching(self, const uint8_t *answer, Py_ssize_t size):
        """The waiter of this answer, a whole frame. Raises UnexpectedAnswer, Truncated."""
        if size < KP_ANSWER_CORRELATION_ID_OFFSET + 4 or not self.count or (
            self.sent_ones[self.first].correlation_id != kp_int32(answer + KP_ANSWER_CORRELATION_ID_OFFSET)
        ):
            raise unexpected_answer(self.oldest, answer[:size])
        return self.take()

    cdef inline object take(self):
        """Take out the oldest waiter."""
        waiter = self.waiters[self.first]
        self.waiters[self.first] = None
        self.awaited_bytes -= self.sent_ones[self.first].size
        self.sent_at = self.sent_ones[self.first].at
        self.first = (self.first + 1) & (self.room - 1)
        self.count -= 1
        return waiter

    def receive(self, nbytes):
        for frame in self.frames.buffer_updated(nbytes):
            yield self.match(frame), frame

    def replace(self, waiters):
        cdef Py_ssize_t at, place
        for at in range(self.count):
            place = (self.first + at) & (self.room - 1)
            waiter = self.waiters[place]
            self.waiters[place] = waiters.get(waiter, waiter)

    def end(self):
        while self.count:
            yield self.take()

    def clear(self):
        while self.count:
            self.take()
