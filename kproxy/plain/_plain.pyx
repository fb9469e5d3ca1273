# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
"""Forward produce requests whose routes are all proven, compiled (kproxy.proxy.plain_path is the reference).

`CompiledPath.take` gets every whole frame of a client first. A request that meets the gate below is indexed, sent by
the routes of its partitions, answered and noted here; everything else is left to the Python path from the same frame,
with nothing changed. A request that was sent here and meets anything but success enters the core like one of the Python
plain path: its pieces and slot have the attributes that `PlainPath.leave` reads.

The gate: a produce request that wire.h indexes, of an offered version, with acks 1 or all, no partition twice, and a
deadline ahead. The core is quiet, has handled the topology's version and has no read of many partitions open. No topic
has a writer group. Every partition's route is proven.

States of a slot
  open      some of its parts are unanswered
  filled    its whole answer is known; kproxy.proxy.answer_order writes it in its turn

Invariants
1. `take` changes nothing before the gate is passed, and nothing can fail behind it but memory.
2. A route is kept only for the generation of the core's routes that it was found in (kproxy.routing.routes).
3. At most MOST_PLACES partition indexes are kept, proven or not; then all are forgotten.
4. A frame is kept until its slot is written: the answers, the trail and a hand-over to the core read it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from "Python.h":
    Py_buffer *PyMemoryView_GET_BUFFER(object view)

cdef extern from "wire.h" nogil:
    enum:
        KP_MAX_PARTITIONS
        KP_TOPIC_IDS_FROM
        KP_FLEXIBLE_FROM
        KP_ANSWER_CORRELATION_ID_OFFSET
    ctypedef struct kp_topic:
        uint32_t head_start, name_start, name_end, first, count, tail_start, tail_end
    ctypedef struct kp_entry:
        uint32_t start, end, records, topic
        int32_t partition_index
    ctypedef struct kp_request:
        uint32_t size, topics_start, topics_end, topic_count, entry_count
        int32_t correlation_id, timeout_ms
        int16_t version, acks
        int is_transactional
    int16_t kp_int16(const uint8_t *p)
    int32_t kp_int32(const uint8_t *p)
    int64_t kp_int64(const uint8_t *p)
    void kp_put_int32(uint8_t *p, int32_t value)
    uint8_t *kp_put_count(uint8_t *p, uint32_t count, int flexible)
    int kp_scan(const uint8_t *frame, uint32_t size, kp_request *request, kp_topic *topics, kp_entry *entries)
    uint32_t kp_result_bytes(int version)
    uint32_t kp_of_one_topic(const kp_entry *entries, const uint32_t *chosen, uint32_t start, uint32_t count)
    uint32_t kp_topics_of(const kp_entry *entries, const uint32_t *chosen, uint32_t count)
    uint32_t kp_answer_bytes(
        const kp_request *request, const kp_topic *topics, const kp_entry *entries, const uint32_t *chosen, uint32_t count)
    int kp_is_success(
        const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
        const uint32_t *chosen, uint32_t count, const uint8_t *answer, uint32_t size, uint32_t *results)
    void kp_put_answer(
        const uint8_t *frame, const kp_request *request, const kp_topic *topics, uint8_t *answer, uint32_t size,
        uint32_t *results)
    uint32_t kp_part_bytes(
        const kp_request *request, const kp_topic *topics, const kp_entry *entries, const uint32_t *chosen, uint32_t count)
    void kp_part(
        const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
        const uint32_t *chosen, uint32_t count, int32_t correlation_id, uint8_t *part, uint32_t bytes)

cdef extern from *:
    """
    /* As in kproxy.trail.acknowledgements. */
    #define MOST_FINISHED 998
    #define ONE_BATCH (1LL << 48)
    #define MOST_OFFSET (1LL << 62)
    #define LEAST_ENTRY 69
    #define HEADER_BYTES 61
    #define PRODUCER_BYTES 10
    /* A larger part is written from the request's own bytes, without a copy. */
    #define MOST_COPIED (64 << 10)
    #define MOST_PLACES 65536
    #define PRODUCE_KEY 0
    """
    const int64_t MOST_FINISHED, ONE_BATCH, MOST_OFFSET
    const uint32_t LEAST_ENTRY, HEADER_BYTES, MOST_COPIED
    const int PRODUCER_BYTES, MOST_PLACES, PRODUCE_KEY

# Where a request is indexed before it is known to be plain, and where an answer's results are.
cdef kp_topic _topics[KP_MAX_PARTITIONS]
cdef kp_entry _entries[KP_MAX_PARTITIONS]
cdef uint32_t _results[KP_MAX_PARTITIONS]
cdef uint32_t _parts[KP_MAX_PARTITIONS]
cdef int64_t _connections[KP_MAX_PARTITIONS]
_MINUS_INFINITY = float("-inf")


cdef class OpenChunk:
    """The open chunk of `kproxy.trail.acknowledgements.Acked`, which says what the attributes mean."""

    cdef public bytes producer
    cdef public bint counts_sequences
    cdef public int64_t first_sequence, next_sequence, first_offset, next_offset
    cdef public list spans
    cdef int64_t batches, size

    @property
    def volume(self):
        return self.size + ONE_BATCH * self.batches

    @volume.setter
    def volume(self, value):
        self.batches, self.size = divmod(value, ONE_BATCH)

    cdef bint go_on(self, const uint8_t *header, int64_t base_offset, int64_t size):
        """Take a batch that continues the chunk; False if it does not."""
        cdef int64_t count, sequence = kp_int32(header + 53)
        if sequence != self.next_sequence or PyBytes_GET_SIZE(self.producer) != PRODUCER_BYTES:
            return False
        if memcmp(header + 43, PyBytes_AS_STRING(self.producer), PRODUCER_BYTES) != 0:
            return False
        count = <int64_t>kp_int32(header + 23) + 1
        if base_offset != self.next_offset:
            if base_offset < 0 or base_offset > MOST_OFFSET or len(self.spans) >= MOST_FINISHED:
                return False
            self.spans.append(self.first_offset)
            self.spans.append(self.next_offset - self.first_offset)
            self.first_offset = base_offset
        self.next_offset = base_offset + count
        if self.counts_sequences:
            self.next_sequence = sequence + count
        self.size += size
        self.batches += 1
        return True


cdef class _Route:
    """The proven route of a partition: where it is sent, and where its acknowledgements are noted (None: nowhere)."""

    cdef object upstream
    cdef int64_t connection
    cdef OpenChunk acked
    # The request that named the partition last.
    cdef uint64_t named_by


cdef class CompiledSlot:
    """The place of one answer, and the record of the request (kproxy.proxy.answer_order.Slot)."""

    cdef public object buffers, is_allowed
    cdef public int64_t weight, frame_bytes
    cdef public double began
    cdef readonly object order
    cdef readonly int64_t sequence, routed_at
    cdef readonly double deadline
    cdef CompiledPath path
    cdef object frame, parsed
    cdef kp_request head
    cdef void *block
    cdef kp_topic *topics
    cdef kp_entry *entries
    # The entries by part, and for a split request where their results go in the merged answer.
    cdef uint32_t *chosen
    cdef uint32_t *places
    cdef list routes
    cdef bytearray answer
    cdef list done
    cdef uint32_t open_parts

    is_silent = False

    def __dealloc__(self):
        PyMem_Free(self.block)

    cdef keep(self, const kp_request *head, uint32_t parts):
        """Copy the index of the request; it is split where `parts` is more than 1."""
        cdef size_t topics = head.topic_count * sizeof(kp_topic), entries = head.entry_count * sizeof(kp_entry)
        cdef size_t chosen = head.entry_count * sizeof(uint32_t), places = chosen if parts > 1 else 0
        self.block = PyMem_Malloc(topics + entries + chosen + places)
        if self.block == NULL:
            raise MemoryError
        self.head = head[0]
        self.topics = <kp_topic *>self.block
        self.entries = <kp_entry *>(<char *>self.block + topics)
        self.chosen = <uint32_t *>(<char *>self.block + topics + entries)
        self.places = <uint32_t *>(<char *>self.block + topics + entries + chosen)
        memcpy(self.topics, _topics, topics)
        memcpy(self.entries, _entries, entries)
        self.open_parts = parts

    def fill(self, list buffers, is_allowed=None):
        """See kproxy.proxy.answer_order.Slot."""
        self.buffers = buffers
        self.is_allowed = is_allowed
        self.order.flush()

    @property
    def request(self):
        """The request as the Python codec reads it, with its client's own correlation_id."""
        if self.parsed is None:
            self.parsed = self.path.parse(self.frame, self.head.correlation_id)
        return self.parsed

    @property
    def exchange(self):
        """The results so far of a request that is sent in parts; None for one that is sent whole."""
        cdef CompiledPiece piece
        if self.answer is None:
            return None
        exchange = self.path.make_exchange(self.request, self.sequence, self.deadline)
        cdef uint32_t each, result_bytes = kp_result_bytes(self.head.version)
        for piece in self.done:
            results = []
            for each in range(piece.first, piece.first + piece.count):
                start = self.places[self.chosen[each]]
                results.append(bytes(self.answer[start:start + result_bytes]))
            exchange.take_all(piece.part, results)
        return exchange

    def take_out(self):
        """Copy the request out of a much larger receive buffer."""
        if self.parsed is not None:
            self.parsed.take_out()
            self.frame = self.parsed.frame
            return
        buffer = self.frame.obj
        if isinstance(buffer, bytearray) and len(self.frame) < len(buffer) // 2:
            self.frame = memoryview(bytearray(self.frame))

    cdef const uint8_t *bytes(self):
        return <const uint8_t *>PyMemoryView_GET_BUFFER(self.frame).buf

    cdef note(self, uint32_t first, uint32_t count, object answer, const uint8_t *received):
        """Note the acknowledged entries of a part; `_results` has where they are in the answer."""
        cdef const uint8_t *frame = self.bytes()
        cdef bint flexible = self.head.version >= KP_FLEXIBLE_FROM
        cdef kp_entry *entry
        cdef OpenChunk acked
        cdef uint32_t at, size
        cdef int64_t base_offset
        for at in range(count):
            acked = (<_Route>self.routes[self.chosen[first + at]]).acked
            if acked is None:
                continue
            entry = self.entries + self.chosen[first + at]
            size = entry.end - flexible - entry.records
            if entry.end - entry.start < LEAST_ENTRY or size < HEADER_BYTES:
                continue
            base_offset = kp_int64(received + _results[at] + 6)
            if not acked.go_on(frame + entry.records, base_offset, size):
                acked.add(self, self.frame, entry.records, base_offset, size)


cdef class CompiledPiece:
    """The ticket of one part of a request, and its plan (kproxy.proxy.plain_path.PlannedPart)."""

    cdef readonly CompiledSlot slot
    cdef readonly object upstream
    cdef readonly int64_t connection
    cdef CompiledPath path
    # Its entries in `slot.chosen`.
    cdef uint32_t first, count
    cdef bint is_whole

    expects_answer = True
    may_wait_until = _MINUS_INFINITY

    @property
    def planned(self):
        return self

    @property
    def part(self):
        """Its selection; None for the whole request."""
        cdef uint32_t each, at
        cdef kp_entry *entry
        if self.is_whole:
            return None
        cdef list selection = [], ordinals = None
        cdef int64_t topic = -1
        for at in range(self.first, self.first + self.count):
            each = self.slot.chosen[at]
            entry = self.slot.entries + each
            if entry.topic != topic:
                topic, ordinals = entry.topic, []
                selection.append((topic, ordinals))
            ordinals.append(each - self.slot.topics[topic].first)
        return selection

    def sent(self):
        """Never called: it has an answer."""

    def unconfirmed(self):
        """Never called, for the same reason."""

    def answered(self, frame):
        """Take the answer; other than for success the request goes to the core."""
        if not self.succeeded(frame):
            self.path.adopt(self).answered(frame)

    def lost(self, *, written):
        self.path.adopt(self).lost(written=written)

    cdef bint succeeded(self, frame) except -1:
        cdef CompiledSlot slot = self.slot
        cdef Py_buffer *view = PyMemoryView_GET_BUFFER(frame)
        cdef uint8_t *received = <uint8_t *>view.buf
        cdef uint32_t at, result_bytes
        cdef char *answer
        if not kp_is_success(
            slot.bytes(), &slot.head, slot.topics, slot.entries, slot.chosen + self.first, self.count, received,
            <uint32_t>view.len, _results,
        ):
            return False
        slot.note(self.first, self.count, frame, received)
        if self.is_whole:
            self.path.close(slot.head.entry_count)
            kp_put_int32(received + KP_ANSWER_CORRELATION_ID_OFFSET, slot.head.correlation_id)
            slot.fill([frame])
            return True
        result_bytes = kp_result_bytes(slot.head.version)
        answer = PyByteArray_AS_STRING(slot.answer)
        for at in range(self.count):
            memcpy(answer + slot.places[slot.chosen[self.first + at]], received + _results[at], result_bytes)
        slot.done.append(self)
        slot.open_parts -= 1
        if not slot.open_parts:
            self.path.close(slot.head.entry_count)
            slot.fill([slot.answer])
        return True


cdef class CompiledPath:
    """The compiled plain path of one client connection.

    `shell` is its kproxy.proxy.fanout.FanoutShell, `answers` its AnswerOrder. `parse` and `make_exchange` make of a
    request sent here what the core takes.
    """

    cdef object shell, core, routes, plain, answers, context, topology, tally, budget, clock, acks, upstreams
    cdef object parse, make_exchange, adopt
    # Whether a route to a topic may be kept; None: to every one.
    cdef object may_write
    cdef double deadline_cap_ms
    cdef uint64_t serial
    # By topic name and by topic id: for each partition index its _Route, or None.
    cdef dict by_name, by_id
    cdef bytes last_topic
    cdef list last_routes
    cdef bint last_is_id
    cdef int64_t generation, places
    cdef int request_key_shift

    def __init__(self, shell, answers, context, adopt, parse, make_exchange, int version_bits):
        self.shell, self.answers, self.context = shell, answers, context
        self.core, self.plain, self.acks = shell.core, shell.plain, shell.acks
        self.routes, self.upstreams = shell.core.routes, shell.upstreams
        self.may_write = shell.may_write
        self.topology, self.tally, self.budget, self.clock = (
            context.topology, context.tally, context.budget, context.clock)
        self.adopt, self.parse, self.make_exchange = adopt, parse, make_exchange
        self.deadline_cap_ms = context.limits.deadline_cap_ms
        self.request_key_shift = version_bits
        self.forget()

    cdef forget(self):
        self.by_name, self.by_id, self.last_topic, self.last_routes, self.places = {}, {}, None, None, 0
        self.generation = self.routes.generation

    cdef close(self, uint32_t partitions):
        """Stop counting a request as open on the plain path."""
        plain = self.plain
        plain.open_count -= 1
        if partitions > 1 and plain.open_partitions:
            plain.open_partitions -= partitions

    # Routes

    @property
    def kept(self):
        """The topics whose routes are kept, and the partition indexes that they have room for."""
        return len(self.by_name) + len(self.by_id), self.places

    cdef list routes_of(self, const uint8_t *name, uint32_t size, bint is_id):
        """The routes of a topic by partition index."""
        if (
            self.last_topic is not None
            and self.last_is_id == is_id
            and PyBytes_GET_SIZE(self.last_topic) == size
            and memcmp(PyBytes_AS_STRING(self.last_topic), name, size) == 0
        ):
            return self.last_routes
        topic = PyBytes_FromStringAndSize(<const char *>name, size)
        found = (self.by_id if is_id else self.by_name).get(topic)
        if found is None:
            # Kept with its first route: a client may name any topics.
            found = []
        self.last_topic, self.last_routes, self.last_is_id = topic, found, is_id
        return found

    cdef _Route find(self, list routes, object topic, int32_t partition_index, bint is_id, object frame):
        """The route of a partition, as the core has it; None if it has none."""
        cdef _Route route
        if partition_index >= MOST_PLACES:
            return None
        name = self.topology.name_of(topic) if is_id else topic
        if name is None:
            return None
        if self.may_write is not None and not self.may_write(name):
            return None
        connection = self.routes.proven_on(name, partition_index)
        if connection is None:
            return None
        if partition_index >= len(routes):
            more = partition_index + 1 - len(routes)
            if self.places + more > MOST_PLACES:
                self.forget()
                return None
            self.places += more
            routes.extend([None] * more)
        route = _Route()
        route.connection = connection
        route.upstream = self.upstreams[connection]
        if self.acks is not None:
            route.acked = self.acks.open_chunk(frame, name, partition_index, route.upstream.owner)
        routes[partition_index] = route
        (self.by_id if is_id else self.by_name)[topic] = routes
        return route

    # Requests

    def take(self, frame, double first_byte_at, ranges):
        """Send a request if it is plain; False leaves it, unchanged, to the Python path."""
        cdef Py_buffer *view = PyMemoryView_GET_BUFFER(frame)
        cdef const uint8_t *data = <const uint8_t *>view.buf
        cdef kp_request head
        if view.len < 8 or kp_int16(data + 4) != PRODUCE_KEY or view.len > 0x7FFFFFFF:
            return False
        if not self.core.takes_plain or not self.shell.follows:
            return False
        own = self.context.own
        if own is not None and own.gated:
            return False
        if not kp_scan(data, <uint32_t>view.len, &head, _topics, _entries) or not (head.acks == -1 or head.acks == 1):
            return False
        if head.is_transactional and self.may_write is not None:
            return False
        versions = ranges.get(PRODUCE_KEY)
        if versions is None or not versions[0] <= head.version <= versions[1]:
            return False
        cdef double cap_ms = head.timeout_ms if head.timeout_ms < self.deadline_cap_ms else self.deadline_cap_ms
        cdef double seconds = 0.9 * cap_ms / 1000
        cdef double deadline = first_byte_at + (seconds if seconds > 1.0 else 1.0)
        if deadline <= <double>self.clock():
            return False
        if self.plain.open_partitions and self.plain.open_partitions + head.entry_count > KP_MAX_PARTITIONS:
            return False
        cdef uint32_t parts = 0
        found = self.find_all(&head, data, frame, &parts)
        if found is None:
            return False
        self.send(frame, first_byte_at, deadline, &head, found, parts)
        return True

    cdef list find_all(self, const kp_request *head, const uint8_t *data, object frame, uint32_t *parts):
        """The routes of all entries, and in `_parts` the part of each; None if one has none, or is named twice."""
        cdef list found = [], routes
        cdef _Route route
        cdef kp_topic *topic
        cdef bint is_id = head.version >= KP_TOPIC_IDS_FROM
        cdef uint32_t place, at, part, part_count = 0
        cdef int32_t index
        if self.routes.generation != self.generation:
            self.forget()
        self.serial += 1
        for place in range(head.topic_count):
            topic = _topics + place
            routes = self.routes_of(data + topic.name_start, topic.name_end - topic.name_start, is_id)
            for at in range(topic.first, topic.first + topic.count):
                index = _entries[at].partition_index
                route = <_Route>routes[index] if index < len(routes) else None
                if route is None:
                    route = self.find(routes, self.last_topic, index, is_id, frame)
                    if route is None:
                        return None
                if route.named_by == self.serial:
                    return None
                route.named_by = self.serial
                part = 0
                while part < part_count and _connections[part] != route.connection:
                    part += 1
                if part == part_count:
                    _connections[part] = route.connection
                    part_count += 1
                _parts[at] = part
                found.append(route)
        parts[0] = part_count
        return found

    cdef send(
        self, object frame, double began, double deadline, const kp_request *head, list routes, uint32_t parts
    ):
        cdef CompiledSlot slot = CompiledSlot.__new__(CompiledSlot)
        cdef uint32_t count = head.entry_count, part, at, first, answer_bytes
        slot.keep(head, parts)
        slot.path, slot.frame, slot.routes = self, frame, routes
        slot.began, slot.deadline = began, deadline
        slot.routed_at = self.topology.version
        slot.weight = slot.frame_bytes = head.size
        answers, plain = self.answers, self.plain
        slot.order = answers
        slot.sequence = answers.sequence + 1
        answers.sequence = slot.sequence
        self.shell.newest = slot.sequence
        answers.slots.append(slot)
        answers.in_flight_bytes += slot.weight
        self.budget.held += slot.frame_bytes
        self.tally.requests[PRODUCE_KEY << self.request_key_shift | head.version] += 1
        plain.open_count += 1
        if count > 1:
            plain.open_partitions += count
        if parts == 1:
            for at in range(count):
                slot.chosen[at] = at
            piece = self.piece(slot, 0, count, True)
            (<CompiledPiece>piece).upstream.forward(piece, frame)
            return
        self.context.counters["splits"] += 1
        answer_bytes = kp_answer_bytes_of_all(slot, count)
        slot.answer = bytearray(answer_bytes)
        slot.done = []
        kp_put_answer(
            slot.bytes(), &slot.head, slot.topics, <uint8_t *>PyByteArray_AS_STRING(slot.answer), answer_bytes,
            slot.places)
        at = 0
        pieces = []
        for part in range(parts):
            first = at
            for each in range(count):
                if _parts[each] == part:
                    slot.chosen[at] = each
                    at += 1
            pieces.append(self.piece(slot, first, at - first, False))
        for piece in pieces:
            self.send_part(slot, piece)

    cdef CompiledPiece piece(self, CompiledSlot slot, uint32_t first, uint32_t count, bint is_whole):
        cdef CompiledPiece piece = CompiledPiece.__new__(CompiledPiece)
        cdef _Route route = slot.routes[slot.chosen[first]]
        piece.path, piece.slot, piece.first, piece.count, piece.is_whole = self, slot, first, count, is_whole
        piece.upstream, piece.connection = route.upstream, route.connection
        return piece

    cdef send_part(self, CompiledSlot slot, CompiledPiece piece):
        cdef uint32_t *chosen = slot.chosen + piece.first
        cdef uint32_t size = kp_part_bytes(&slot.head, slot.topics, slot.entries, chosen, piece.count)
        cdef int32_t correlation_id = piece.upstream.next_correlation_id()
        cdef bytes part
        if size > MOST_COPIED:
            buffers = self.slices(slot, piece, size, correlation_id)
        else:
            part = PyBytes_FromStringAndSize(NULL, size)
            kp_part(
                slot.bytes(), &slot.head, slot.topics, slot.entries, chosen, piece.count, correlation_id,
                <uint8_t *>PyBytes_AS_STRING(part), size)
            buffers = [part]
        piece.upstream.send(piece, correlation_id, buffers)

    cdef list slices(self, CompiledSlot slot, CompiledPiece piece, uint32_t size, int32_t correlation_id):
        """A part as buffers: its entries are slices of the request, neighbours in one slice."""
        cdef const uint8_t *frame = slot.bytes()
        cdef uint32_t *chosen = slot.chosen + piece.first
        cdef bint flexible = slot.head.version >= KP_FLEXIBLE_FROM
        cdef uint32_t at = 0, end, ordinals, start, stop
        cdef uint8_t text[8]
        cdef kp_topic *topic
        cdef list buffers = []
        cdef bytearray small = bytearray(frame[:slot.head.topics_start])
        kp_put_int32(<uint8_t *>PyByteArray_AS_STRING(small), <int32_t>(size - 4))
        kp_put_int32(<uint8_t *>PyByteArray_AS_STRING(small) + 8, correlation_id)
        small += text[:kp_put_count(text, kp_topics_of(slot.entries, chosen, piece.count), flexible) - text]
        while at < piece.count:
            topic = slot.topics + slot.entries[chosen[at]].topic
            ordinals = kp_of_one_topic(slot.entries, chosen, at, piece.count)
            small += frame[topic.head_start:topic.name_end]
            small += text[:kp_put_count(text, ordinals, flexible) - text]
            buffers.append(small)
            end = at + ordinals
            while at < end:
                start, stop = slot.entries[chosen[at]].start, slot.entries[chosen[at]].end
                at += 1
                while at < end and slot.entries[chosen[at]].start == stop:
                    stop = slot.entries[chosen[at]].end
                    at += 1
                buffers.append(slot.frame[start:stop])
            small = bytearray(frame[topic.tail_start:topic.tail_end])
        small += frame[slot.head.topics_end:slot.head.size]
        buffers.append(small)
        return buffers


cdef uint32_t kp_answer_bytes_of_all(CompiledSlot slot, uint32_t count):
    cdef uint32_t at
    for at in range(count):
        slot.chosen[at] = at
    return kp_answer_bytes(&slot.head, slot.topics, slot.entries, slot.chosen, count)


# What wire.h does, for tests.

cdef uint32_t _index(frame, kp_request *head) except 0xFFFFFFFF:
    cdef Py_buffer *view = PyMemoryView_GET_BUFFER(frame)
    return kp_scan(<const uint8_t *>view.buf, <uint32_t>view.len, head, _topics, _entries)


cdef uint32_t _choose(selection, uint32_t *chosen) except 0xFFFFFFFF:
    cdef uint32_t count = 0
    for place, ordinals in selection:
        for ordinal in ordinals:
            chosen[count] = _topics[<uint32_t>place].first + <uint32_t>ordinal
            count += 1
    return count


def index(frame not None):
    """The index of a request, a memoryview, if it is as nearly all are; else None."""
    cdef kp_request head
    cdef uint32_t place, at
    if not _index(frame, &head):
        return None
    topics = []
    for place in range(head.topic_count):
        topic = _topics[place]
        entries = [
            (_entries[at].partition_index, _entries[at].start, _entries[at].end, _entries[at].records)
            for at in range(topic.first, topic.first + topic.count)
        ]
        spans = (topic.head_start, topic.name_start, topic.name_end, topic.tail_start, topic.tail_end)
        topics.append((spans, entries))
    return head.version, head.correlation_id, head.acks, head.timeout_ms, head.topics_start, head.topics_end, topics


def part(frame not None, selection, int32_t correlation_id):
    """The request with only the selected entries (kproxy_codec.partitioned.Splitter)."""
    cdef kp_request head
    cdef uint32_t chosen[KP_MAX_PARTITIONS]
    if not _index(frame, &head):
        raise ValueError("not indexed")
    cdef uint32_t count = _choose(selection, chosen)
    cdef uint32_t size = kp_part_bytes(&head, _topics, _entries, chosen, count)
    cdef bytes encoded = PyBytes_FromStringAndSize(NULL, size)
    kp_part(
        <const uint8_t *>PyMemoryView_GET_BUFFER(frame).buf, &head, _topics, _entries, chosen, count, correlation_id,
        <uint8_t *>PyBytes_AS_STRING(encoded), size)
    return encoded


def results(frame not None, selection, answer not None):
    """Where the results of the selected entries are in an answer, a memoryview, with nothing but success; else None."""
    cdef kp_request head
    cdef uint32_t chosen[KP_MAX_PARTITIONS]
    cdef uint32_t at
    cdef Py_buffer *view = PyMemoryView_GET_BUFFER(answer)
    if not _index(frame, &head):
        raise ValueError("not indexed")
    cdef uint32_t count = _choose(selection, chosen)
    if not kp_is_success(
        <const uint8_t *>PyMemoryView_GET_BUFFER(frame).buf, &head, _topics, _entries, chosen, count,
        <const uint8_t *>view.buf, <uint32_t>view.len, _results,
    ):
        return None
    return [_results[at] for at in range(count)]
