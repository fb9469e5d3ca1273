# Gather messages and write them once in each step of the event loop: the twin of kproxy.proxy.outbox.

cdef extern from *:
    """
    /* As in kproxy.proxy.outbox. */
    #define JOIN_BYTES (64 << 10)
    #define FLUSH_BYTES (512 << 10)
    #define MOST_RUNS 4
    /* Up to this size a copy costs less than the memoryviews that the event loop makes of anything but bytes. */
    #define COPY_BYTES (8 << 10)
    /* Up to this size messages are copied one behind another into a block, so that one buffer is written. */
    #define SMALL_BYTES (8 << 10)
    #define BLOCK_BYTES (128 << 10)
    #define MOST_BLOCKS 64
    /* At most this many of them are searched for one that is free. */
    #define LOOKS 16
    /* For outboxes beyond MOST_BLOCKS that have messages in the same step, unless a message needs more. Thousands have
       when thousands of clients begin, and the holes that their blocks leave in the process's memory stay. */
    #define SMALL_BLOCK_BYTES (2 << 10)

    /* Whether only `view` refers to its memory, and only the caller and its list refer to `view`. */
    static inline int kp_is_free(PyObject *view) {
        PyMemoryViewObject *object = (PyMemoryViewObject *)view;
        return object->exports == 0 && object->mbuf->exports == 1;
    }
    """
    const Py_ssize_t JOIN_BYTES, FLUSH_BYTES, COPY_BYTES, SMALL_BYTES, BLOCK_BYTES, MOST_BLOCKS, LOOKS
    const Py_ssize_t SMALL_BLOCK_BYTES
    const int MOST_RUNS
    bint kp_is_free(object view)


cdef class Flushes:
    """See kproxy.proxy.outbox.Flushes."""

    cdef list waiting
    # Memoryviews of blocks, to be used again when nothing refers to their memory; the newest is likeliest in a cache.
    cdef list blocks
    # Blocks that outboxes have.
    cdef Py_ssize_t lent
    # While all are written: the time, once an outbox has asked for it; else 0.
    cdef double now
    cdef bint is_flushing

    def __init__(self):
        self.waiting, self.blocks = [], []

    cdef object take_block(self, Py_ssize_t least):
        cdef Py_ssize_t at = len(self.blocks) - 1, last = at - LOOKS
        self.lent += 1
        if self.lent > MOST_BLOCKS:
            return memoryview(PyByteArray_FromStringAndSize(NULL, max(least, SMALL_BLOCK_BYTES)))
        while at >= 0 and at > last:
            if kp_is_free(self.blocks[at]):
                return self.blocks.pop(at)
            at -= 1
        # Not zeros: what is not written to costs no memory.
        return memoryview(PyByteArray_FromStringAndSize(NULL, BLOCK_BYTES))

    cdef int give_block(self, view) except -1:
        self.lent -= 1
        if len(view) < BLOCK_BYTES:
            return 0
        if len(self.blocks) >= MOST_BLOCKS:
            del self.blocks[0]
        self.blocks.append(view)
        return 0

    cdef int add(self, Outbox outbox) except -1:
        outbox.is_waiting = True
        if not self.waiting:
            outbox.loop.call_soon(self.flush_all)
        self.waiting.append(outbox)
        return 0

    def flush_all(self):
        cdef list waiting = self.waiting
        cdef Outbox outbox
        cdef Py_ssize_t at = 0
        self.waiting, self.is_flushing = [], True
        try:
            while at < len(waiting):
                outbox = waiting[at]
                at += 1
                outbox.is_waiting = False
                outbox.write_out()
        finally:
            self.now, self.is_flushing = 0.0, False
            while at < len(waiting):
                self.add(waiting[at])
                at += 1


_flushes = WeakKeyDictionary()


cdef Flushes flushes_of(loop):
    """The `Flushes` of an event loop."""
    found = _flushes.get(loop)
    if found is None:
        found = _flushes[loop] = Flushes()
    return found


cdef class Outbox:
    """See kproxy.proxy.outbox.Outbox.

    The newest message may still be a span of a receive buffer, to which its neighbour there is added without a copy.
    """

    cdef object loop
    cdef readonly object _transport
    cdef Flushes flushes
    cdef bint is_waiting
    cdef list buffers
    # The span behind `buffers`: [start, end) of `view`.
    cdef object view
    cdef Py_ssize_t start, end
    # Where small messages are joined, up to `filled`; None before the first.
    cdef object block
    cdef Py_ssize_t filled
    cdef public Py_ssize_t _bytes
    cdef public int64_t written_bytes

    def __init__(self, loop, transport):
        self.loop, self._transport, self.flushes = loop, transport, flushes_of(loop)
        self.buffers = []

    @property
    def put_bytes(self):
        return self.written_bytes + self._bytes

    def put_one(self, buffer):
        self.put_object(buffer)

    def put(self, buffers):
        for buffer in buffers:
            self.put_object(buffer)

    cdef int put_object(self, buffer) except -1:
        cdef Py_ssize_t size = len(buffer)
        if size <= SMALL_BYTES:
            if type(buffer) is bytes:
                return self.put_copy(<uint8_t *>PyBytes_AS_STRING(buffer), size)
            if type(buffer) is bytearray:
                return self.put_copy(<uint8_t *>PyByteArray_AS_STRING(buffer), size)
            if type(buffer) is memoryview:
                return self.put_span(buffer, 0, size)
        self.close_span()
        self.buffers.append(buffer)
        return self.count(size)

    cdef int put_span(self, view, Py_ssize_t start, Py_ssize_t end) except -1:
        """Queue [start, end) of `view` behind the bytes that were put before."""
        self.add_span(view, start, end)
        return self.count(end - start)

    cdef int add_span(self, view, Py_ssize_t start, Py_ssize_t end) except -1:
        """Like `put_span`, for a part of a message: `count` must follow with the size of all of it."""
        if start == end:
            return 0
        if view is self.view and start == self.end:
            self.end = end
        elif self.view is not None and end - start <= SMALL_BYTES:
            self.add_copy(data_of(view) + start, end - start)
        else:
            self.close_span()
            self.view, self.start, self.end = view, start, end
        return 0

    cdef uint8_t *add_copy(self, const uint8_t *data, Py_ssize_t size) except NULL:
        """Like `add_span`, with a copy; return where it is."""
        cdef uint8_t *place
        if size > SMALL_BYTES:
            self.close_span()
            self.view, self.start, self.end = memoryview(PyByteArray_FromStringAndSize(<char *>data, size)), 0, size
            return data_of(self.view)
        place = self.place(size)
        memcpy(place, data, size)
        self.filled += size
        self.end += size
        return place

    cdef int put_copy(self, const uint8_t *data, Py_ssize_t size) except -1:
        """Queue a copy of at most SMALL_BYTES."""
        self.add_copy(data, size)
        return self.count(size)

    cdef uint8_t *place(self, Py_ssize_t size) except NULL:
        """The place to write at most SMALL_BYTES to, which `placed` counts afterwards."""
        cdef Py_ssize_t held = 0
        if self.view is not None and self.view is not self.block:
            held = self.end - self.start
            if held > SMALL_BYTES:
                self.close_span()
                held = 0
        if self.block is None or len(self.block) - self.filled < held + size:
            if self.view is self.block:
                self.close_span()
            if self.block is not None:
                self.flushes.give_block(self.block)
            self.block, self.filled = self.flushes.take_block(held + size), 0
        if held:
            memcpy(data_of(self.block) + self.filled, data_of(self.view) + self.start, held)
            self.view, self.start, self.end = self.block, self.filled, self.filled + held
            self.filled += held
        elif self.view is None:
            self.view, self.start, self.end = self.block, self.filled, self.filled
        return data_of(self.block) + self.filled

    cdef inline int placed(self, Py_ssize_t size) except -1:
        self.filled += size
        self.end += size
        return self.count(size)

    cdef inline int count(self, Py_ssize_t size) except -1:
        self._bytes += size
        if not self.is_waiting:
            self.flushes.add(self)
        if self._bytes > FLUSH_BYTES:
            self.write_out()
        return 0

    cdef int close_span(self) except -1:
        view, self.view = self.view, None
        if view is not None:
            self.buffers.append(view[self.start:self.end])
        return 0

    @property
    def _buffers(self):
        self.close_span()
        return self.buffers

    @_buffers.setter
    def _buffers(self, list buffers not None):
        self.view, self.buffers = None, buffers
        self.leave_block()

    def flush(self):
        self.write_out()

    def _write_all(self):
        self.write_all()

    cdef int write_out(self) except -1:
        return self.write_all()

    cdef int write_all(self) except -1:
        """Hand everything to the transport."""
        cdef list buffers
        cdef Py_ssize_t size = self._bytes
        if not size:
            return 0
        self._bytes = 0
        if self._transport.is_closing():
            # Lost, like bytes that the transport itself still holds.
            self._buffers = []
            return 0
        self.written_bytes += size
        view, self.view = self.view, None
        if not self.buffers:
            if view is None or size != self.end - self.start:
                raise ValueError("other bytes are put than are counted")
            if size <= COPY_BYTES:
                message = PyBytes_FromStringAndSize(<char *>data_of(view) + self.start, size)
            else:
                message = view[self.start:self.end]
            view = None
            self.leave_block()
            self._transport.write(message)
            return 0
        buffers, self.buffers = self.buffers, []
        if view is not None:
            buffers.append(view[self.start:self.end])
            view = None
        self.leave_block()
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif size <= JOIN_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)
        return 0

    cdef inline int leave_block(self) except -1:
        """Let others use the block when its written bytes are gone."""
        block, self.block = self.block, None
        if block is not None:
            self.flushes.give_block(block)
        return 0


cdef struct kp_run:
    int64_t end, count
    double at


cdef class TimedOutbox(Outbox):
    """See kproxy.proxy.outbox.TimedOutbox."""

    cdef public bint _is_paused
    # A kproxy.observe.tally.Durations, and its numbers.
    cdef object writing
    cdef double *histogram
    cdef Clock clock
    cdef kp_run runs[MOST_RUNS]
    cdef int run_count

    def __init__(self, loop, transport, writing, clock):
        Outbox.__init__(self, loop, transport)
        self.writing, self.histogram, self.clock = writing, histogram_of(writing), clock_of(clock)

    def add_answers(self, int64_t count, double at):
        self.add_run(count, at)

    cdef int add_run(self, int64_t count, double at) except -1:
        if self.run_count == MOST_RUNS:
            self.runs[MOST_RUNS - 1].end = self.written_bytes + self._bytes
            self.runs[MOST_RUNS - 1].count += count
            return 0
        self.runs[self.run_count].end = self.written_bytes + self._bytes
        self.runs[self.run_count].count, self.runs[self.run_count].at = count, at
        self.run_count += 1
        return 0

    def _count_runs(self):
        self.count_runs()

    cdef int count_runs(self) except -1:
        """Count the time that written answers have waited here."""
        cdef double now
        cdef int done = 0
        if not self.run_count:
            return 0
        now = self.flushes.now or self.clock.now()
        if self.flushes.is_flushing:
            self.flushes.now = now
        while done < self.run_count and self.runs[done].end <= self.written_bytes:
            count_time(self.histogram, now - self.runs[done].at, self.runs[done].count)
            done += 1
        self.run_count -= done
        if done and self.run_count:
            memmove(self.runs, self.runs + done, self.run_count * sizeof(kp_run))
        return 0

    def _forget_runs(self):
        self.run_count = 0

    cdef int write_out(self) except -1:
        """Hand as much to the transport as it takes."""
        if not self._is_paused:
            if self._bytes <= FLUSH_BYTES:
                self.write_all()
            else:
                self._write_in_parts()
            self.count_runs()
        if self._is_paused:
            self._count_untaken()
        return 0
