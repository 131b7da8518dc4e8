// Hides libraries of GPUs from a program, whatever the machine has installed: an auditor of the dynamic loader (LD_AUDIT, see
// rtld-audit(7)). HIDDEN names the beginnings of their names, with a space between two; REFUSED is the file that every such name
// is appended to when it is looked for.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace {

bool is_hidden(const char* library) {
    const char* hidden = getenv("HIDDEN");
    while (hidden && *hidden) {
        const size_t length = strcspn(hidden, " ");
        if (length > 0 && strncmp(library, hidden, length) == 0) return true;
        hidden += length + strspn(hidden + length, " ");
    }
    return false;
}

void note(const char* library) {
    const char* path = getenv("REFUSED");
    const int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (file < 0) return;
    char line[256];
    const size_t length = strnlen(library, sizeof line - 1);
    memcpy(line, library, length);
    line[length] = '\n';
    // One call, so that lines of two processes do not mix.
    if (write(file, line, length + 1) < 0) abort();
    close(file);
}

}  // namespace

extern "C" unsigned la_version(unsigned) { return LAV_CURRENT; }

// Asked first for a name as the program gave it, then for each place where that may lie: a null pointer says that it does not
// lie there, so the program is answered as where there is no such file.
extern "C" char* la_objsearch(const char* name, uintptr_t*, unsigned asked_for) {
    const char* last = strrchr(name, '/');
    const char* library = last ? last + 1 : name;
    if (!is_hidden(library)) return const_cast<char*>(name);
    if (asked_for != LA_SER_ORIG) return nullptr;
    note(library);
    return const_cast<char*>(name);
}
