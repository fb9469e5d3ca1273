# Process all spans of acknowledged offsets: the twins of functions of kproxy.trail.spans.

cdef extern from "spans.h" nogil:
    ctypedef struct kp_interval:
        int64_t start, end
    kp_interval *kp_sort_intervals(kp_interval *all, kp_interval *spare, size_t count)
    size_t kp_join_intervals(kp_interval *all, size_t count)
    char *kp_put_numbers(char *to, const int64_t *numbers, size_t count)
    enum:
        KP_NUMBER_BYTES


def union(int64_t floor, list starts, list ends, list added, Py_ssize_t most):
    """See kproxy.trail.spans.union."""
    cdef Py_ssize_t at, count = len(starts), left
    cdef kp_interval *all
    cdef array spans
    cdef int64_t *numbers
    for spans in added:
        count += len(spans) // 2
    all = <kp_interval *>PyMem_Malloc(2 * count * sizeof(kp_interval) + 1)
    if all == NULL:
        raise MemoryError
    block = all
    try:
        left = len(starts)
        for at in range(left):
            all[at].start, all[at].end = starts[at], ends[at]
        for spans in added:
            numbers = <int64_t *>spans.data.as_voidptr
            for at in range(0, len(spans) - 1, 2):
                all[left].start, all[left].end = numbers[at], numbers[at] + numbers[at + 1]
                left += 1
        all = kp_sort_intervals(all, all + count, count)
        if all[0].start < floor:
            return None
        left = kp_join_intervals(all, count)
        if not left:
            return None
        if left > most:
            floor = all[left - most - 1].end
            all += left - most
            left = most
        starts, ends = [], []
        for at in range(left):
            starts.append(all[at].start)
            ends.append(all[at].end)
        return floor, starts, ends
    finally:
        PyMem_Free(block)


def extend_spans(array spans, array more):
    """See kproxy.trail.spans.extend_spans."""
    cdef Py_ssize_t count = len(spans), added = len(more), at
    cdef int64_t *last = <int64_t *>spans.data.as_voidptr + count - 2
    cdef int64_t *first = <int64_t *>more.data.as_voidptr
    if count and last[0] + last[1] == first[0]:
        last[1] += first[1]
        first += 2
        added -= 2
    if added:
        resize_smart(spans, count + added)
        for at in range(added):
            spans.data.as_longlongs[count + at] = first[at]


def to_json(array spans):
    """See kproxy.trail.spans.to_json."""
    cdef char *text = <char *>PyMem_Malloc(len(spans) * KP_NUMBER_BYTES + 2)
    cdef char *end
    if text == NULL:
        raise MemoryError
    try:
        text[0] = b"["
        end = kp_put_numbers(text + 1, <const int64_t *>spans.data.as_voidptr, len(spans))
        end[0] = b"]"
        return PyBytes_FromStringAndSize(text, end + 1 - text)
    finally:
        PyMem_Free(text)
