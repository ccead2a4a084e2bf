// Stands in for vLLM's prefill and decode engines, very fast: one epoll thread and no JSON parser.
//
//   nodes --prefill PORT --decode PORT [--prefill PORT ...] [--blocks N]
//
// Port 0 is any free one; each is told on stdout, in the order of the arguments.
// A prefill port answers POST /v1/chat/completions with JSON and kv_transfer_params, a decode port
// with a stream of events, one write each, the handle on the finish chunk; in the shapes of vLLM
// 0.33. As there, prefill gives a handle only when asked for one and decode only when it used one.
//
// It watches what the router does. load.c begins the first message with "[c=<12 hex> n=<12 hex>]"
// (conversation, request); prefill hands over as "chatcmpl-p-<c>-<n>", and decode counts whether
// that very id came with that very prompt. GET /stats tells, GET /ctl?interval_us=N sets the pace.
//
// What a request asks for is searched for in the first and last kilobytes of its body, so that a
// long prompt costs no more here than a short one.
#include "polling.h"

#include <signal.h>

enum role { PREFILL, DECODE };
enum { LISTENERS_MAX = 1024, EVENTS_MAX = 256, READ_MIN = 16384, ID_LEN = 2 * HEX + 1 };

#define ID_PLACE "000000000000-000000000000"
#define CREATED 1790000000

static long interval_us; // between chunks; 0: all at once
static long blocks = 64; // numbers in remote_block_ids
static struct {
    long accepted, requests, kv_ok, kv_bad, kv_missing, prefill_bad;
} counts;

static char *handles[2]; // kv_transfer_params by role, with ID_PLACE in it
static size_t handle_len[2];

struct conn {
    int fd;
    enum role role;
    char *in, *out; // what is read; what the kernel did not take yet
    size_t in_len, in_cap, out_off, out_len, out_cap;
    int busy, broken, polls_out;
    char id[ID_LEN + 1];
    long left;    // chunks to send
    int64_t due;  // when the next one is
    int heap_pos; // in the heap of those that wait, -1 if not
    int stream, hands_over;
};

// Those that wait, in a binary heap by due time

static struct conn **heap;
static int heap_len, heap_cap;

static void heap_set(int i, struct conn *c) {
    heap[i] = c;
    c->heap_pos = i;
}

static void heap_up(int i) {
    struct conn *c = heap[i];
    for (; i && heap[(i - 1) / 2]->due > c->due; i = (i - 1) / 2) heap_set(i, heap[(i - 1) / 2]);
    heap_set(i, c);
}

static void heap_down(int i) {
    struct conn *c = heap[i];
    for (int k = 2 * i + 1; k < heap_len; k = 2 * i + 1) {
        if (k + 1 < heap_len && heap[k + 1]->due < heap[k]->due) k++;
        if (heap[k]->due >= c->due) break;
        heap_set(i, heap[k]);
        i = k;
    }
    heap_set(i, c);
}

static void wait_until(struct conn *c, int64_t due) {
    if (heap_len == heap_cap) {
        heap_cap = heap_cap ? heap_cap * 2 : 64;
        heap = grown(heap, heap_cap * sizeof *heap);
    }
    c->due = due;
    heap[heap_len] = c;
    heap_up(heap_len++);
}

static void wait_no_more(struct conn *c) {
    int i = c->heap_pos;
    if (i < 0) return;
    c->heap_pos = -1;
    if (i == --heap_len) return;
    struct conn *moved = heap[heap_len];
    heap_set(i, moved);
    heap_down(i);
    heap_up(moved->heap_pos);
}

// Writing

static void put(struct conn *c, const char *data, size_t len) {
    if (c->out_len == c->out_off) {
        ssize_t sent = send(c->fd, data, len, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            c->broken = 1;
            return;
        }
        if (sent > 0) data += sent, len -= sent;
        if (!len) return;
        c->out_off = c->out_len = 0;
    }
    if (c->out_len + len > c->out_cap) c->out = grown(c->out, c->out_cap = (c->out_len + len) * 2);
    memcpy(c->out + c->out_len, data, len);
    c->out_len += len;
    poll_out(c->fd, c, &c->polls_out, 1);
}

static void put_rest(struct conn *c) {
    while (c->out_off < c->out_len) {
        ssize_t sent = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) c->broken = 1;
            return;
        }
        c->out_off += sent;
    }
    c->out_off = c->out_len = 0;
    poll_out(c->fd, c, &c->polls_out, 0);
}

// Answers

static char *text; // where answers are made
static size_t text_cap;

static void room_for(size_t len) {
    if (len > text_cap) text = grown(text, text_cap = len);
}

static void make_handles(void) {
    for (int role = PREFILL; role <= DECODE; role++) {
        const char *name = role == PREFILL ? "prefill" : "decode";
        char *p = handles[role] = grown(handles[role], 1024 + 8 * blocks);
        p += sprintf(p, "{\"do_remote_prefill\":%s,\"do_remote_decode\":%s,\"remote_block_ids\":[[",
                     role == PREFILL ? "true" : "false", role == PREFILL ? "false" : "true");
        for (long i = 0; i < blocks; i++)
            p += sprintf(p, "%s%ld", i ? "," : "", 10000 + i * 37 % 50000);
        p += sprintf(p,
                     "]],\"remote_engine_id\":\"%s-5f0c9e0a-8c1d-4b0e-9a53-1f2e3d4c5b6a\","
                     "\"remote_request_id\":\"chatcmpl-%c-" ID_PLACE "\","
                     "\"remote_host\":\"127.0.0.1\",\"remote_port\":%d,\"tp_size\":1,"
                     "\"dcp_size\":1,\"pp_size\":1,\"remote_num_tokens\":%ld,"
                     "\"remote_blocks_expiry_time\":%s,\"remote_registration_generation\":0,"
                     "\"transfer_mode\":\"read\"}",
                     name, name[0], role == PREFILL ? 5600 : 5601, blocks * 16,
                     role == PREFILL ? "null" : "12345.678901234");
        handle_len[role] = p - handles[role];
    }
}

static size_t add_handle(char *to, struct conn *c) {
    if (!c->hands_over) return sprintf(to, "null");
    memcpy(to, handles[c->role], handle_len[c->role]);
    char *place = memmem(to, handle_len[c->role], ID_PLACE, ID_LEN);
    memcpy(place, c->id, ID_LEN);
    return handle_len[c->role];
}

static void answer(struct conn *c, const char *status, const char *type, const char *body,
                   size_t len) {
    char head[256];
    int head_len =
        sprintf(head,
                "HTTP/1.1 %s\r\ndate: Sat, 29 Nov 2026 15:00:00 GMT\r\nserver: uvicorn\r\n"
                "content-length: %zu\r\ncontent-type: %s\r\n\r\n",
                status, len, type);
    char *whole = grown(NULL, head_len + len + 1);
    memcpy(whole, head, head_len);
    memcpy(whole + head_len, body, len);
    put(c, whole, head_len + len);
    free(whole);
}

static void answer_whole(struct conn *c) {
    room_for(2048 + handle_len[c->role]);
    size_t n = sprintf(
        text,
        "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":%d,\"model\":\"m\","
        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\" tok\","
        "\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,"
        "\"reasoning\":null},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,"
        "\"token_ids\":null,\"routed_experts\":null,\"weight_versions\":null}],"
        "\"service_tier\":null,\"system_fingerprint\":null,\"usage\":{\"prompt_tokens\":%ld,"
        "\"total_tokens\":%ld,\"completion_tokens\":1,\"prompt_tokens_details\":null,"
        "\"completion_tokens_details\":null},\"prompt_logprobs\":null,\"prompt_token_ids\":null,"
        "\"prompt_text\":null,\"kv_transfer_params\":",
        c->id, CREATED, blocks * 16, blocks * 16 + 1);
    n += add_handle(text + n, c);
    n += sprintf(text + n, ",\"ec_transfer_params\":null,\"metrics\":null}");
    answer(c, "200 OK", "application/json", text, n);
    c->busy = 0;
}

// One event is one chunk of the body and one write.
static void put_event(struct conn *c, const char *event, size_t len) {
    char *chunk = grown(NULL, len + 64);
    size_t n = sprintf(chunk, "%zx\r\n", len);
    memcpy(chunk + n, event, len);
    memcpy(chunk + n + len, "\r\n", 2);
    put(c, chunk, n + len + 2);
    free(chunk);
}

static void begin_stream(struct conn *c) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ndate: Sat, 29 Nov 2026 15:00:00 GMT\r\n"
        "server: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "transfer-encoding: chunked\r\n\r\n";
    put(c, head, sizeof head - 1);
    room_for(1024);
    int n = sprintf(text,
                    "data: {\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\","
                    "\"created\":%d,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"role\":"
                    "\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}],"
                    "\"prompt_token_ids\":null,\"prompt_text\":null}\n\n",
                    c->id, CREATED);
    put_event(c, text, n);
}

static void put_chunk(struct conn *c) {
    int is_last = --c->left <= 0;
    room_for(2048 + handle_len[c->role]);
    size_t n = sprintf(text,
                       "data: {\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\","
                       "\"created\":%d,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":"
                       "{\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":%s,"
                       "\"token_ids\":null}],\"kv_transfer_params\":",
                       c->id, CREATED, is_last ? "\"length\",\"stop_reason\":null" : "null");
    n += is_last ? add_handle(text + n, c) : (size_t)sprintf(text + n, "null");
    n += sprintf(text + n, "}\n\n");
    put_event(c, text, n);
    if (!is_last) return;
    static const char done[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    put(c, done, sizeof done - 1);
    c->busy = 0;
}

// Requests

static char *find(char *body, size_t len, const char *what) {
    size_t window = 4096 + 8 * blocks, n = strlen(what);
    if (len <= 2 * window) return memmem(body, len, what, n);
    char *found = memmem(body, window, what, n);
    return found ? found : memmem(body + len - window, window, what, n);
}

// Returns the value after `name`, which is written with quotes and colon.
static char *value_of(char *body, size_t len, const char *name) {
    char *p = find(body, len, name);
    if (!p) return NULL;
    for (p += strlen(name); p < body + len && *p == ' '; p++);
    return p;
}

static void complete(struct conn *c, char *body, size_t len) {
    counts.requests++;
    strcpy(c->id, ID_PLACE);
    char *p = find(body, len, "[c=");
    if (p && p + 30 < body + len) {
        memcpy(c->id, p + 3, HEX);
        memcpy(c->id + HEX + 1, p + 18, HEX);
    }
    p = value_of(body, len, "\"max_tokens\":");
    long tokens = p ? atol(p) : 32;
    p = value_of(body, len, "\"stream\":");
    c->stream = p && *p == 't';
    p = value_of(body, len,
                 c->role == PREFILL ? "\"do_remote_decode\":" : "\"do_remote_prefill\":");
    c->hands_over = p && *p == 't';
    if (c->role == PREFILL) {
        counts.prefill_bad += c->stream || tokens != 1;
    } else {
        p = find(body, len, "\"chatcmpl-p-");
        if (!p) counts.kv_missing++;
        else if (!memcmp(p + 12, c->id, ID_LEN)) counts.kv_ok++;
        else counts.kv_bad++;
    }
    c->left = tokens > 0 ? tokens : 32;
    c->busy = 1;
    if (!c->stream) {
        answer_whole(c);
        return;
    }
    begin_stream(c);
    if (!interval_us) {
        while (c->busy && !c->broken) put_chunk(c);
        return;
    }
    put_chunk(c);
    // A first random wait, so that streams begun together do not tick together.
    if (c->busy) wait_until(c, now_us() + interval_us / 2 + random() % (interval_us + 1));
}

static void tell(struct conn *c, char *target) {
    char body[512];
    int n = 2;
    strcpy(body, "{}");
    if (!strncmp(target, "/ctl?interval_us=", 17)) {
        interval_us = atol(target + 17);
    } else if (!strcmp(target, "/stats")) {
        n = sprintf(body,
                    "{\"accepted\":%ld,\"requests\":%ld,\"kv_ok\":%ld,\"kv_bad\":%ld,"
                    "\"kv_missing\":%ld,\"prefill_bad\":%ld}",
                    counts.accepted, counts.requests, counts.kv_ok, counts.kv_bad,
                    counts.kv_missing, counts.prefill_bad);
    } else if (!strcmp(target, "/v1/models")) {
        n = sprintf(body, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\","
                          "\"created\":1790000000,\"owned_by\":\"vllm\",\"root\":\"m\"}]}");
    } else if (!strcmp(target, "/version")) {
        n = sprintf(body, "{\"version\":\"0.33.0\"}");
    } else if (!strcmp(target, "/get_model_info") || !strcmp(target, "/model_info")) {
        n = sprintf(body, "{\"model_path\":\"m\",\"tokenizer_path\":\"m\",\"is_generation\":true}");
    } else if (!strcmp(target, "/get_server_info") || !strcmp(target, "/server_info")) {
        n = sprintf(body,
                    "{\"model_path\":\"m\",\"served_model_name\":\"m\",\"dp_size\":1,"
                    "\"tp_size\":1,\"disaggregation_mode\":\"%s\"}",
                    c->role == PREFILL ? "prefill" : "decode");
    } else if (strcmp(target, "/health") && strcmp(target, "/health_generate")) {
        answer(c, "404 Not Found", "application/json", "{\"detail\":\"Not Found\"}", 22);
        return;
    }
    answer(c, "200 OK", "application/json", body, n);
}

static char *header(char *head, size_t len, const char *name) {
    size_t n = strlen(name);
    for (char *p = memchr(head, '\n', len); p && ++p < head + len;
         p = memchr(p, '\n', head + len - p)) {
        if ((size_t)(head + len - p) <= n || strncasecmp(p, name, n) || p[n] != ':') continue;
        for (p += n + 1; *p == ' '; p++);
        return p;
    }
    return NULL;
}

// Puts a body in chunks together, in place; returns the end of the request, NULL if it is not
// there.
static char *unchunk(char *body, char *end, size_t *len) {
    char *to = body;
    for (char *p = body;;) {
        char *line = memmem(p, end - p, "\r\n", 2);
        if (!line) return NULL;
        size_t n = strtoul(p, NULL, 16);
        if ((size_t)(end - line) < n + 4) return NULL;
        memmove(to, line + 2, n);
        to += n;
        p = line + 2 + n + 2;
        if (n) continue;
        *len = to - body;
        return p;
    }
}

// Tells whether a body in chunks is there whole: it is put together only then.
static int has_all_chunks(char *body, char *end) {
    for (char *p = body;;) {
        char *line = memmem(p, end - p, "\r\n", 2);
        if (!line) return 0;
        size_t n = strtoul(p, NULL, 16);
        if ((size_t)(end - line) < n + 4) return 0;
        if (!n) return 1;
        p = line + 2 + n + 2;
    }
}

// Serves the first request, if it is there whole; returns whether it was.
static int serve_one(struct conn *c) {
    char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4), *value;
    if (!end) return 0;
    size_t head_len = end + 4 - c->in, body_len = 0, used;
    char *body = c->in + head_len, *limit = c->in + c->in_len;
    if ((value = header(c->in, head_len, "transfer-encoding")) &&
        !strncasecmp(value, "chunked", 7)) {
        if (!has_all_chunks(body, limit)) return 0;
        used = unchunk(body, limit, &body_len) - c->in;
    } else {
        if ((value = header(c->in, head_len, "content-length")))
            body_len = strtoul(value, NULL, 10);
        used = head_len + body_len;
        if (c->in_len < used) {
            if (c->in_cap < used + READ_MIN) c->in = grown(c->in, c->in_cap = used + READ_MIN);
            return 0;
        }
    }
    char *target = memchr(c->in, ' ', head_len);
    char *after = target ? memchr(target + 1, ' ', c->in + head_len - target - 1) : NULL;
    if (!after) {
        c->broken = 1;
        return 0;
    }
    *after = 0;
    if (c->in[0] == 'P' && strstr(target + 1, "/completions")) complete(c, body, body_len);
    else tell(c, target + 1);
    memmove(c->in, c->in + used, c->in_len - used);
    c->in_len -= used;
    return 1;
}

static void take_input(struct conn *c) {
    for (;;) {
        if (c->in_cap - c->in_len < READ_MIN)
            c->in = grown(c->in, c->in_cap = c->in_cap ? c->in_cap * 2 : 4 * READ_MIN);
        size_t room = c->in_cap - c->in_len;
        ssize_t got = recv(c->fd, c->in + c->in_len, room, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) c->broken = 1;
        if (got <= 0) break;
        c->in_len += got;
        if ((size_t)got < room) break;
    }
    while (!c->busy && !c->broken && c->in_len && serve_one(c));
}

static void drop(struct conn *c) {
    wait_no_more(c);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

// Listeners and the loop

static struct {
    int fd;
    enum role role;
} listeners[LISTENERS_MAX];
static int listeners_len;

static void listen_on(int port, enum role role) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in a = loopback(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (listeners_len == LISTENERS_MAX || bind(fd, (void *)&a, sizeof a) || listen(fd, 1024)) {
        perror("nodes: listen");
        exit(1);
    }
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = listeners_len};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    listeners[listeners_len].fd = fd;
    listeners[listeners_len++].role = role;
    socklen_t size = sizeof a;
    getsockname(fd, (void *)&a, &size);
    printf("listening on 127.0.0.1:%d\n", ntohs(a.sin_port));
    fflush(stdout);
}

static void accept_all(int listener) {
    int fd;
    while ((fd = accept4(listeners[listener].fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct conn *c = grown(NULL, sizeof *c);
        *c = (struct conn){.fd = fd, .role = listeners[listener].role, .heap_pos = -1};
        counts.accepted++;
        poll_in(fd, c);
    }
}

static void tick(void) {
    int64_t now = heap_len ? now_us() : 0;
    while (heap_len && heap[0]->due <= now) {
        struct conn *c = heap[0];
        wait_no_more(c);
        put_chunk(c);
        if (c->busy) wait_until(c, c->due + interval_us);
        else
            while (!c->busy && !c->broken && c->in_len && serve_one(c));
        if (c->broken) drop(c);
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(0);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--prefill")) listen_on(atoi(argv[i + 1]), PREFILL);
        else if (!strcmp(argv[i], "--decode")) listen_on(atoi(argv[i + 1]), DECODE);
        else if (!strcmp(argv[i], "--blocks")) blocks = atol(argv[i + 1]);
    }
    if (!listeners_len) {
        fprintf(stderr, "usage: nodes --prefill PORT --decode PORT ... [--blocks N]\n");
        return 2;
    }
    make_handles();
    struct epoll_event events[EVENTS_MAX];
    for (;;) {
        // Finer than epoll_wait's milliseconds.
        int64_t left = heap_len ? heap[0]->due - now_us() : 0;
        if (left < 0) left = 0;
        struct timespec timeout = {left / 1000000, left % 1000000 * 1000};
        int n = epoll_pwait2(epoll_fd, events, EVENTS_MAX, heap_len ? &timeout : NULL, NULL);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 < LISTENERS_MAX) {
                accept_all(events[i].data.u64);
                continue;
            }
            struct conn *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) put_rest(c);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) take_input(c);
            if (c->broken) drop(c);
        }
        tick();
    }
}
