# Gather messages and write them once in each step of the event loop: the twin of kproxy.proxy.outbox.

cdef extern from *:
    """
    /* As in kproxy.proxy.outbox. */
    #define JOIN_BYTES (64 << 10)
    #define FLUSH_BYTES (512 << 10)
    #define PART_BYTES (256 << 10)
    #define LAST_PART_BYTES (320 << 10)
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
    const Py_ssize_t JOIN_BYTES, FLUSH_BYTES, PART_BYTES, LAST_PART_BYTES, COPY_BYTES, SMALL_BYTES, BLOCK_BYTES, MOST_BLOCKS, LOOKS
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


cdef class Outbox:
    """See kproxy.proxy.outbox.Outbox.

    The newest message may still be a span of a receive buffer, to which its neighbour there is added without a copy.
    """

    cdef object loop, transport
    cdef Flushes flushes
    cdef bint is_waiting
    cdef list buffers
    # The span behind `buffers`: [start, end) of `view`.
    cdef object view
    cdef Py_ssize_t start, end
    # Where small messages are joined, up to `filled`; None before the first.
    cdef object block
    cdef Py_ssize_t filled
    cdef Py_ssize_t size
    cdef readonly int64_t written_bytes

    def __init__(self, loop, transport, Flushes flushes):
        self.loop, self.transport, self.flushes = loop, transport, flushes
        self.buffers = []

    @property
    def put_bytes(self):
        return self.written_bytes + self.size

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
        self.size += size
        if not self.is_waiting:
            self.flushes.add(self)
        if self.size > FLUSH_BYTES:
            self.write_out()
        return 0

    cdef int close_span(self) except -1:
        view, self.view = self.view, None
        if view is not None:
            self.buffers.append(view[self.start:self.end])
        return 0

    def flush(self):
        self.write_out()

    cdef int write_out(self) except -1:
        return self.write_all()

    cdef int write_all(self) except -1:
        """Hand everything to the transport."""
        cdef list buffers
        cdef Py_ssize_t size = self.size
        if not size:
            return 0
        self.size = 0
        if self.transport.is_closing():
            # Lost, like bytes that the transport itself still holds.
            self.view, self.buffers = None, []
            self.leave_block()
            return 0
        self.written_bytes += size
        view, self.view = self.view, None
        if not self.buffers:
            if size <= COPY_BYTES:
                message = PyBytes_FromStringAndSize(<char *>data_of(view) + self.start, size)
            else:
                message = view[self.start:self.end]
            view = None
            self.leave_block()
            self.transport.write(message)
            return 0
        buffers, self.buffers = self.buffers, []
        if view is not None:
            buffers.append(view[self.start:self.end])
            view = None
        self.leave_block()
        if len(buffers) == 1:
            self.transport.write(buffers[0])
        elif size <= JOIN_BYTES:
            self.transport.write(b"".join(buffers))
        else:
            self.transport.writelines(buffers)
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


cdef class PacedOutbox(Outbox):
    """See kproxy.proxy.outbox.PacedOutbox."""

    cdef object share
    cdef bint is_paused
    cdef Py_ssize_t looked_at, untaken
    cdef Durations writing
    cdef Clock clock
    cdef kp_run runs[MOST_RUNS]
    cdef int run_count

    def __init__(self, loop, transport, Flushes flushes, share, Durations writing, clock):
        Outbox.__init__(self, loop, transport, flushes)
        self.share, self.writing, self.clock = share, writing, clock_of(clock)

    @property
    def taken_bytes(self):
        return self.written_bytes - self.transport.get_write_buffer_size()

    def pause(self):
        self.is_paused = True
        self.looked_at = 0
        self.untaken = self.transport.get_write_buffer_size()
        self.share.leave_untaken(self.untaken)

    def resume(self):
        self.is_paused = False
        self.write_out()
        if not self.is_paused:
            self.share.leave_untaken(0)

    def add_answers(self, int64_t count, double at):
        self.add_run(count, at)

    cdef int add_run(self, int64_t count, double at) except -1:
        if self.run_count == MOST_RUNS:
            self.runs[MOST_RUNS - 1].end = self.written_bytes + self.size
            self.runs[MOST_RUNS - 1].count += count
            return 0
        self.runs[self.run_count].end = self.written_bytes + self.size
        self.runs[self.run_count].count, self.runs[self.run_count].at = count, at
        self.run_count += 1
        return 0

    cdef int count_runs(self) except -1:
        """Count the time that written answers have waited here."""
        cdef double now = self.flushes.now or self.clock.now()
        cdef int done = 0
        if self.flushes.is_flushing:
            self.flushes.now = now
        while done < self.run_count and self.runs[done].end <= self.written_bytes:
            self.writing.add(now - self.runs[done].at, self.runs[done].count)
            done += 1
        self.run_count -= done
        if done and self.run_count:
            memmove(self.runs, self.runs + done, self.run_count * sizeof(kp_run))
        return 0

    cdef int write_out(self) except -1:
        """Hand as much to the transport as it takes."""
        if not self.is_paused:
            if self.size <= FLUSH_BYTES:
                self.write_all()
            else:
                self.write_in_parts()
            if self.run_count:
                self.count_runs()
        if self.is_paused:
            self.count_untaken()
        return 0

    def flush_all(self):
        self.is_paused = False
        self.write_all()
        if self.run_count:
            self.count_runs()
        self.share.leave_untaken(0)

    def discard(self):
        self.view, self.buffers, self.size, self.run_count = None, [], 0, 0
        self.leave_block()
        self.share.leave_untaken(0)

    cdef int count_untaken(self) except -1:
        self.close_span()
        for buffer in self.buffers[self.looked_at:]:
            if not self.share.has_room(buffer):
                self.untaken += len(buffer)
        self.looked_at = len(self.buffers)
        self.share.leave_untaken(self.untaken)
        return 0

    cdef int write_in_parts(self) except -1:
        cdef Py_ssize_t size, fits, most
        self.close_span()
        waiting, self.buffers = deque(self.buffers), []
        while waiting and not self.is_paused and not self.transport.is_closing():
            part = []
            size = 0
            most = PART_BYTES if self.size > LAST_PART_BYTES else LAST_PART_BYTES
            while waiting and size < most:
                buffer = waiting.popleft()
                fits = most - size
                if len(buffer) > fits:
                    view = memoryview(buffer)
                    waiting.appendleft(view[fits:])
                    buffer = view[:fits]
                part.append(buffer)
                size += len(buffer)
            self.size -= size
            self.written_bytes += size
            self.transport.writelines(part)
        if self.transport.is_closing():
            self.size = 0
        else:
            self.buffers = list(waiting)
        return 0
