{#-
    The columns of a relation as a mapping from name to data type, in order. Spark finds a column whatever the case of
    its letters, and so does `column_name`; what goes into SQL is the name as the relation spells it.
-#}

{% macro types_of(columns) %}
    {#- Of columns as dbt's adapter describes them. -#}
    {%- set types = {} -%}
    {%- for column in columns -%}
        {%- do types.update({column.name: column.dtype}) -%}
    {%- endfor -%}
    {{ return(types) }}
{% endmacro %}


{% macro column_types(relation) %}
    {%- set relation = lakehouse_patterns.unlimited(relation) -%}
    {{ return(lakehouse_patterns._with_whole_types(
        lakehouse_patterns.types_of(adapter.get_columns_in_relation(relation)), relation
    )) }}
{% endmacro %}


{% macro known_types(relation) %}
    {#- Empty for what can't be described: a name, which may be that of a CTE, and a table that is not there yet. -#}
    {{ return({} if relation is string or not execute else lakehouse_patterns.column_types(relation)) }}
{% endmacro %}


{% macro require_free_names(names, own, what, advice='rename it in the query, or leave it out with except') %}
    {#-
        For a macro or a materialization that adds columns (`own`) to a user's. Without it the engine would report an
        ambiguous reference or a duplicate column.
    -#}
    {%- for name in names -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns.column_name(own, name) is none,
            "the column '" ~ name ~ "' has the name of a column that " ~ what ~ ' adds: ' ~ advice
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro query_types(sql) %}
    {#- The same of a query, which isn't run. -#}
    {%- set types, relation = {}, '(\n' ~ sql ~ '\n)' -%}
    {%- for row in run_query('describe query select * from ' ~ relation).rows -%}
        {%- do types.update({row[0]: row[1]}) -%}
    {%- endfor -%}
    {{ return(lakehouse_patterns._with_whole_types(types, relation)) }}
{% endmacro %}


{% macro _with_whole_types(types, relation) %}
    {#- `describe` cuts a struct of more than 25 fields short; the whole type costs a second statement. -#}
    {%- set cut = [] -%}
    {%- for name, type in types.items() if ' more fields' in type -%}
        {%- do cut.append(name) -%}
    {%- endfor -%}
    {%- if cut -%}
        {%- set row = run_query(lakehouse_patterns.whole_types_sql(relation, cut)).rows[0] -%}
        {%- for name in cut -%}
            {%- do types.update({name: row[loop.index0]}) -%}
        {%- endfor -%}
    {%- endif -%}
    {{ return(types) }}
{% endmacro %}


{% macro whole_types_sql(relation, names) %}
    {#- One row, although no row is read. -#}
    select
        {%- for name in lakehouse_patterns.quoted_names(names) %}
        typeof(any_value({{ name }})) as type_{{ loop.index }}{{ ',' if not loop.last }}
        {%- endfor %}
    from {{ relation }}
    where false
{% endmacro %}


{% macro stored_type(type) %}
    {#- As a table that is made of a query has it. -#}
    {{ return(modules.re.sub('\\b(var)?char\\(\\d+\\)', 'string', type)) }}
{% endmacro %}


{% macro _as_stored(name, type, partitions) %}
    {#-
        A column as Delta stores it, for a select list: an empty text in a partition column is NULL. A key or a condition
        on the empty text would not find the row that an earlier run wrote.
    -#}
    {%- set quoted = lakehouse_patterns.quoted_name(name) -%}
    {{ return("nullif(" ~ quoted ~ ", '') as " ~ quoted
        if lakehouse_patterns.stored_type(type) == 'string' and name in partitions else quoted) }}
{% endmacro %}


{% macro column_name(types, name) %}
    {#- As the relation spells it, or none. -#}
    {%- for known in types if known | lower == name | string | lower -%}
        {{ return(known) }}
    {%- endfor -%}
    {{ return(none) }}
{% endmacro %}


{% macro spelled_names(types, names) %}
    {#- Names as the relation spells them; one that it lacks stays as it is. -#}
    {%- set spelled = [] -%}
    {%- for name in names -%}
        {%- set known = lakehouse_patterns.column_name(types, name) -%}
        {%- do spelled.append(name if known is none else known) -%}
    {%- endfor -%}
    {{ return(spelled) }}
{% endmacro %}


{% macro require_columns(types, names) %}
    {%- for name in names -%}
        {%- do lakehouse_patterns.require(
            name in types, "the model has no column '" ~ name ~ "'; it has: " ~ (types | join(', '))
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro require_boolean(types, option, name) %}
    {%- do lakehouse_patterns.require(
        types[name] == 'boolean', option ~ " must be a boolean, '" ~ name ~ "' is a " ~ types[name]
    ) -%}
{% endmacro %}


{% macro require_time(types, option, name) %}
    {%- do lakehouse_patterns.require(
        types[name] in ['timestamp', 'timestamp_ntz', 'date'],
        option ~ " must be a timestamp or a date, '" ~ name ~ "' is a " ~ types[name]
    ) -%}
{% endmacro %}


{% macro holds_type(type, word) %}
    {#- Whether a type is that of a word or has it inside. A field of such a name has a colon behind it. -#}
    {{ return(modules.re.search('(^|[<,:])' ~ word ~ '($|[<,>])', type) is not none) }}
{% endmacro %}


{% macro is_sortable(type) %}
    {#- Spark sorts and compares no maps, variants and calendar intervals. -#}
    {%- for word in ['map', 'variant', 'interval'] if lakehouse_patterns.holds_type(type, word) -%}
        {{ return(false) }}
    {%- endfor -%}
    {{ return(true) }}
{% endmacro %}


{% macro require_storable(types) %}
    {#- Delta has no intervals, and no NULL without a type inside of another type; the engine says so under a trace. -#}
    {%- for name, type in types.items() -%}
        {%- do lakehouse_patterns.require(
            not modules.re.search('(^|[<,:])interval(?![\\w:])|[<,:]void(?![\\w:])', type),
            "Delta stores no column '" ~ name ~ "' of type " ~ type ~ ': cast it in the model, or leave it out'
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro require_sortable(types, names, option) %}
    {#- Of names that are no columns (expressions) nothing is known. -#}
    {%- for name in names -%}
        {%- set known = lakehouse_patterns.column_name(types, name | string | replace('`', '')) -%}
        {%- do lakehouse_patterns.require(
            known is none or lakehouse_patterns.is_sortable(types[known]),
            option ~ " may not be '" ~ name ~ "' of type " ~ types.get(known)
            ~ ', which Spark neither compares nor sorts: use a column with a text of it, such as to_json'
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro names_without_case(names, without) %}
    {#- The names that are not among others, whatever the case of their letters. -#}
    {%- set lowered, kept = without | map('lower') | list, [] -%}
    {%- for name in names if name | lower not in lowered -%}
        {%- do kept.append(name) -%}
    {%- endfor -%}
    {{ return(kept) }}
{% endmacro %}


{% macro no_rows_sql(types) %}
    {#- Columns of these types and no row. -#}
    select
        {%- for name, type in types.items() %}
        cast(null as {{ type }}) as {{ lakehouse_patterns.quoted_name(name) }}{{ ',' if not loop.last }}
        {%- endfor %}
    where false
{% endmacro %}


{% macro _exposed_columns_sql(relation, names, type='') %}
    {#- One row for each column of the relation that has one of the names, in any case, and a type that begins so. -#}
    {%- set lowered, exposed = lakehouse_patterns.as_list(names) | map('lower') | list, [] -%}
    {%- if execute -%}
        {%- for name, stored in lakehouse_patterns.column_types(relation).items()
            if name | lower in lowered and stored.startswith(type) -%}
            {%- do exposed.append(lakehouse_patterns.text_literal(name)) -%}
        {%- endfor -%}
    {%- endif -%}
select explode(array({{ exposed | join(', ') if exposed else "''" }})) as column_name
{{ 'where false' if not exposed }}
{%- endmacro %}
