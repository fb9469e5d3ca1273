# Take acknowledged chunks and remember the last ones: the twins of the classes that kproxy.trail.overlaps has in Python
# for what each look does.

cdef extern from *:
    """
    /* As in kproxy.trail.overlaps. */
    #define MAX_ADDED 24
    #define MAX_SPANS_REMEMBERED 64
    #define MAX_SPANS_TOGETHER 2048
    """
    const Py_ssize_t MAX_ADDED, MAX_SPANS_TOGETHER
    const uint32_t MAX_SPANS_REMEMBERED


cdef class Writes:
    """See kproxy.trail.overlaps.Writes."""

    cdef public list writes
    cdef public Py_ssize_t most
    cdef Py_ssize_t span_count

    def __init__(self):
        self.writes, self.most = [], MAX_ADDED

    def add(self, list added not None):
        cdef OpenChunk writer
        cdef Chunk chunk, last
        for writer, chunk in added:
            last = self.last(writer, chunk)
            if last is None or not last.go_on(chunk):
                writer.place = len(self.writes)
                self.writes.append((writer.origin, chunk))
                # It may have grown by many steps.
                set_room(&chunk.held, chunk.held.size)
            elif last.held.count > 2 * MAX_SPANS_REMEMBERED:
                last.leave(MAX_SPANS_REMEMBERED)
            self.span_count += chunk.held.count
        return len(self.writes) > self.most or (
            self.span_count > MAX_SPANS_TOGETHER and self.count() > MAX_SPANS_TOGETHER)

    cpdef Py_ssize_t count(self) except -1:
        cdef Chunk chunk
        self.span_count = 0
        for _, chunk in self.writes:
            self.span_count += chunk.held.count
        return self.span_count

    cdef inline Chunk last(self, OpenChunk writer, Chunk chunk):
        """See kproxy.trail.overlaps.Writes."""
        cdef Py_ssize_t place
        cdef Chunk last
        if 0 <= writer.place < len(self.writes):
            last = self.at(writer.place, writer, chunk)
            if last is not None:
                return last
        for place in range(len(self.writes) - 1, -1, -1):
            last = self.at(place, writer, chunk)
            if last is not None:
                writer.place = place
                return last
        return None

    cdef inline Chunk at(self, Py_ssize_t place, OpenChunk writer, Chunk chunk):
        """The write there, if it is of the chunk's producer by this writer."""
        cdef Chunk last
        origin, last = self.writes[place]
        if origin is not writer.origin:
            return None
        if last.producer_id != chunk.producer_id or last.producer_epoch != chunk.producer_epoch:
            return None
        return last


cdef class AddedTo:
    """See kproxy.trail.overlaps.AddedTo."""

    cdef public bint is_kept
    cdef public Intervals intervals
    cdef public list added

    def __init__(self):
        self.is_kept, self.intervals, self.added = True, Intervals(), []


cdef class Partitions:
    """See kproxy.trail.overlaps.Partitions."""

    cdef readonly dict partitions
    cdef readonly object added

    def __init__(self):
        self.partitions, self.added = {}, deque()

    def add(self, OpenChunk writer not None, Chunk chunk not None):
        self.put(writer, chunk)

    def take(self, list writers not None, Py_ssize_t rest, int64_t acked_at, bint is_shipped):
        cdef OpenChunk writer
        if rest < 0:
            raise IndexError(f"there is no writer {rest}")
        while len(writers) > rest:
            writer = <OpenChunk?>writers[len(writers) - 1]
            if not writer.take_into(self, acked_at, is_shipped):
                return True
            writers.pop()
        return False

    cdef int put(self, OpenChunk writer, Chunk chunk) except -1:
        """Like `add`."""
        cdef AddedTo found = writer.partition
        if not chunk.held.count:
            raise ValueError("a chunk without spans")
        if found is None or not found.is_kept:
            found = writer.partition = self.find(writer.key)
        if chunk.held.bytes[0] == 0 and found.is_recreated(chunk):
            found = writer.partition = self.begin(writer.key)
        if not found.added:
            self.added.append(found)
            del self.partitions[writer.key]
            self.partitions[writer.key] = found
        found.added.append((writer, chunk))
        return 0
